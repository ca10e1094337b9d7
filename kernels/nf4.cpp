// 4-bit weights on the CPU: quantize, dequantize, and matmuls of few rows.
//
// A block has 64 values in 32 bytes, the first value of each byte in its upper half, and one scale: fp32, or an 8-bit
// code. Multiply-adds are not fused (-ffp-contract=off), so that results equal those of the reference in nf4.py.

#include <cmath>

#include "bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define PAIRS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#endif

namespace {

constexpr int64_t BLOCK = 64, BYTES = 32;
constexpr int64_t FEW = 1 << 15;  // values per thread, at least
constexpr int64_t SOME = 64;      // blocks whose scales are decoded at a time, if these are quantized
constexpr int MOST = 8;           // maximum rows of x in the fused matmul

// Scales (rows, blocks) of a weight: fp32, or codes of the map `fine`, with a scale in `outer` per 256 codes and their
// mean as the last element. Strides are in blocks, so that column ranges can be decoded. `first` is the index of the
// first block among all blocks of the full weight.
struct Scales {
    const void* at;
    const float *outer, *fine;
    int64_t groups, first, stride;

    // Scales of `count` blocks of a row. `room` is memory for decoded scales.
    const float* of(int64_t row, int64_t block, int64_t count, float* room) const {
        const int64_t place = row * stride + block;
        if (outer == nullptr) return (const float*)at + place;
        const auto* codes = (const uint8_t*)at + place;
        for (int64_t i = 0; i < count; i++) {
            const float scale = fine[codes[i]] * outer[(first + place + i) / 256];
            room[i] = scale + outer[groups];
        }
        return room;
    }
};

template <typename T>
void block(const uint8_t* packed, float scale, const float* table, T* out) {
    T scaled[16];
    for (int i = 0; i < 16; i++) store_rounded(table[i] * scale, scaled[i]);
    for (int i = 0; i < BYTES; i++) {
        out[2 * i] = scaled[packed[i] >> 4];
        out[2 * i + 1] = scaled[packed[i] & 15];
    }
}

template <typename T>
void row(const uint8_t* packed, const float* scales, const float* table, T* out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++) block(packed + b * BYTES, scales[b], table, out + b * BLOCK);
}

#if defined(__x86_64__)

// Codes of 32 weights in 16-bit lanes, or of 16 weights in 32-bit lanes, upper halves of bytes first. Bits above the
// codes are undefined; lookups ignore them.
WIDE inline __m512i codes32(const uint8_t* packed) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)packed));
    return _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
}

WIDE inline __m512i codes16(const uint8_t* packed) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)packed));
    return _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
}

// The 16 values of the codes of a block are in one register, which serves as lookup table.
WIDE void wide_row(const uint8_t* packed, const float* scales, const float* table, bf16* out, int64_t blocks) {
    const __m512 codes = _mm512_loadu_ps(table);
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 x = _mm512_mul_ps(codes, _mm512_set1_ps(scales[b]));
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i top = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        top = _mm512_mask_set1_epi32(top, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), 0x7fc0);
        const __m512i scaled = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(top));  // twice: bit 4 is undefined
        for (int half = 0; half < 2; half++) {
            const __m512i at = codes32(packed + b * BYTES + half * 16);
            _mm512_storeu_si512(out + b * BLOCK + half * 32, _mm512_permutexvar_epi16(at, scaled));
        }
    }
}

WIDE void wide_row(const uint8_t* packed, const float* scales, const float* table, float* out, int64_t blocks) {
    const __m512 codes = _mm512_loadu_ps(table);
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 scaled = _mm512_mul_ps(codes, _mm512_set1_ps(scales[b]));
        for (int part = 0; part < 4; part++) {
            const __m512i at = codes16(packed + b * BYTES + part * 8);
            _mm512_storeu_ps(out + b * BLOCK + part * 16, _mm512_permutexvar_ps(at, scaled));
        }
    }
}

const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");

// Dot products of M rows of x with one row of the weight. Codes are decoded in registers.
template <int M>
PAIRS void dots(const bf16* x, const uint8_t* packed, const float* scales, const float* table, float* sums,
                int64_t blocks, int64_t width) {
    const __m512 codes = _mm512_loadu_ps(table);
    __m512 found[M];
    for (int m = 0; m < M; m++) found[m] = _mm512_loadu_ps(sums + m * 16);
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 x16 = _mm512_mul_ps(codes, _mm512_set1_ps(scales[b]));
        const __m512i scaled = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(x16));
        for (int half = 0; half < 2; half++) {
            const __m512i at = codes32(packed + b * BYTES + half * 16);
            const auto weights = (__m512bh)_mm512_permutexvar_epi16(at, scaled);
            for (int m = 0; m < M; m++) {
                const auto* from = x + m * width + b * BLOCK + half * 32;
                found[m] = _mm512_dpbf16_ps(found[m], weights, (__m512bh)_mm512_loadu_si512(from));
            }
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(sums + m * 16, found[m]);
}

template <int M>
WIDE void dots(const float* x, const uint8_t* packed, const float* scales, const float* table, float* sums,
               int64_t blocks, int64_t width) {
    const __m512 codes = _mm512_loadu_ps(table);
    __m512 found[M];
    for (int m = 0; m < M; m++) found[m] = _mm512_loadu_ps(sums + m * 16);
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 scaled = _mm512_mul_ps(codes, _mm512_set1_ps(scales[b]));
        for (int part = 0; part < 4; part++) {
            const __m512 weights = _mm512_permutexvar_ps(codes16(packed + b * BYTES + part * 8), scaled);
            for (int m = 0; m < M; m++) {
                const __m512 rows = _mm512_loadu_ps(x + m * width + b * BLOCK + part * 16);
                found[m] = _mm512_fmadd_ps(weights, rows, found[m]);
            }
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(sums + m * 16, found[m]);
}

template <typename T>
using Dots = void (*)(const T*, const uint8_t*, const float*, const float*, float*, int64_t, int64_t);

template <typename T>
constexpr Dots<T> DOTS[MOST] = {dots<1>, dots<2>, dots<3>, dots<4>, dots<5>, dots<6>, dots<7>, dots<8>};

// Processors without bf16 dot products dequantize the weight first.
bool able(bf16) { return wide && __builtin_cpu_supports("avx512bf16"); }
bool able(float) { return wide; }

// y = x W^T + b for up to MOST rows of x (tokens, width), accumulated in fp32.
template <typename T>
void few(const T* x, const uint8_t* packed, Scales scales, const float* table, const T* bias, T* y, int64_t tokens,
         int64_t rows, int64_t blocks, int64_t packed_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * blocks * BLOCK > FEW)
    for (int64_t r = 0; r < rows; r++) {
        float sums[MOST * 16] = {}, room[SOME];
        for (int64_t b = 0; b < blocks; b += SOME) {
            const int64_t count = blocks - b < SOME ? blocks - b : SOME;
            DOTS<T>[tokens - 1](x + b * BLOCK, packed + r * packed_stride + b * BYTES, scales.of(r, b, count, room),
                                table, sums, count, blocks * BLOCK);
        }
        for (int64_t m = 0; m < tokens; m++) {
            float whole = bias == nullptr ? 0 : to_float(bias[r]);
            for (int i = 0; i < 16; i++) whole += sums[m * 16 + i];
            store_rounded(whole, y[m * rows + r]);
        }
    }
}

#else

template <typename T>
void wide_row(const uint8_t*, const float*, const float*, T*, int64_t) {}

constexpr bool wide = false;

template <typename T>
bool able(T) { return false; }

template <typename T>
void few(const T*, const uint8_t*, Scales, const float*, const T*, T*, int64_t, int64_t, int64_t, int64_t, int) {}

#endif

template <typename T>
void decode(const uint8_t* packed, Scales scales, const float* table, T* out, int64_t rows, int64_t blocks,
            int64_t packed_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * blocks * BLOCK > FEW)
    for (int64_t r = 0; r < rows; r++) {
        float room[SOME];
        for (int64_t b = 0; b < blocks; b += SOME) {
            const int64_t count = blocks - b < SOME ? blocks - b : SOME;
            const float* by = scales.of(r, b, count, room);
            const auto* from = packed + r * packed_stride + b * BYTES;
            T* to = out + (r * blocks + b) * BLOCK;
            wide ? wide_row(from, by, table, to, count) : row(from, by, table, to, count);
        }
    }
}

}  // namespace

#define SCALES const void *scales, const float *outer, const float *fine, int64_t groups, int64_t first, int64_t stride
#define MADE (Scales{scales, outer, fine, groups, first, stride})

extern "C" {

bool few_bf16_able() { return able(bf16()); }
bool few_fp32_able() { return able(float()); }

void few_bf16(const bf16* x, const uint8_t* packed, SCALES, const float* table, const bf16* bias, bf16* y,
              int64_t tokens, int64_t rows, int64_t blocks, int64_t packed_stride, int threads) {
    few(x, packed, MADE, table, bias, y, tokens, rows, blocks, packed_stride, threads);
}

void few_fp32(const float* x, const uint8_t* packed, SCALES, const float* table, const float* bias, float* y,
              int64_t tokens, int64_t rows, int64_t blocks, int64_t packed_stride, int threads) {
    few(x, packed, MADE, table, bias, y, tokens, rows, blocks, packed_stride, threads);
}

void decode_bf16(const uint8_t* packed, SCALES, const float* table, bf16* out, int64_t rows, int64_t blocks,
                 int64_t packed_stride, int threads) {
    decode(packed, MADE, table, out, rows, blocks, packed_stride, threads);
}

void decode_fp32(const uint8_t* packed, SCALES, const float* table, float* out, int64_t rows, int64_t blocks,
                 int64_t packed_stride, int threads) {
    decode(packed, MADE, table, out, rows, blocks, packed_stride, threads);
}

// Nearest of the 16 values: the number of midpoints below x is its rank, and `order` maps ranks to codes.
void encode(const float* weight, const float* bounds, const uint8_t* order, uint8_t* packed, float* scales,
            int64_t blocks, int threads) {
#pragma omp parallel for num_threads(threads) if (blocks * BLOCK > FEW)
    for (int64_t b = 0; b < blocks; b++) {
        const float* from = weight + b * BLOCK;
        float largest = 0;
        for (int i = 0; i < BLOCK; i++) largest = std::fabs(from[i]) > largest ? std::fabs(from[i]) : largest;
        scales[b] = largest;
        const float inverse = 1.0f / (largest > 1e-38f ? largest : 1e-38f);
        int32_t below[BLOCK] = {};
        for (int k = 0; k < 15; k++)
            for (int i = 0; i < BLOCK; i++) below[i] += !(from[i] * inverse <= bounds[k]);
        for (int i = 0; i < BYTES; i++)
            packed[b * BYTES + i] = order[below[2 * i]] << 4 | order[below[2 * i + 1]];
    }
}
}

// Four-bit weights on the CPU: numbers to codes, and codes to numbers.
//
// A block is 64 numbers, 32 bytes, the first number of each byte in its upper half, and one fp32 scale.
// Products and sums are never fused (-ffp-contract=off): every number equals that of the reference in nf4.py.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#endif

namespace {

constexpr int64_t BLOCK = 64, BYTES = 32;
constexpr int64_t FEW = 1 << 15;  // numbers that are not worth a second thread

using bf16 = uint16_t;

void round(float x, float& out) { out = x; }

void round(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

template <typename T>
void block(const uint8_t* packed, float scale, const float* table, T* out) {
    T scaled[16];
    for (int i = 0; i < 16; i++) round(table[i] * scale, scaled[i]);
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

// All sixteen numbers that a block can hold stand in one register, and every code is looked up there.
WIDE void wide_row(const uint8_t* packed, const float* scales, const float* table, bf16* out, int64_t blocks) {
    const __m512 codes = _mm512_loadu_ps(table);
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 x = _mm512_mul_ps(codes, _mm512_set1_ps(scales[b]));
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i top = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        top = _mm512_mask_set1_epi32(top, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), 0x7fc0);
        const __m512i scaled = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(top));  // twice: bit 4 of a code is free
        for (int half = 0; half < 2; half++) {
            const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(packed + b * BYTES) + half));
            const __m512i at = _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
            _mm512_storeu_si512(out + b * BLOCK + half * 32, _mm512_permutexvar_epi16(at, scaled));
        }
    }
}

WIDE void wide_row(const uint8_t* packed, const float* scales, const float* table, float* out, int64_t blocks) {
    const __m512 codes = _mm512_loadu_ps(table);
    for (int64_t b = 0; b < blocks; b++) {
        const __m512 scaled = _mm512_mul_ps(codes, _mm512_set1_ps(scales[b]));
        for (int part = 0; part < 4; part++) {
            const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)(packed + b * BYTES + part * 8)));
            const __m512i at = _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
            _mm512_storeu_ps(out + b * BLOCK + part * 16, _mm512_permutexvar_ps(at, scaled));
        }
    }
}

const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");

#else

template <typename T>
void wide_row(const uint8_t*, const float*, const float*, T*, int64_t) {}

constexpr bool wide = false;

#endif

// Strides are in elements of what they step over, so that a part of the columns can be decoded alone.
template <typename T>
void decode(const uint8_t* packed, const float* scales, const float* table, T* out, int64_t rows, int64_t blocks,
            int64_t packed_stride, int64_t scale_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * blocks * BLOCK > FEW)
    for (int64_t r = 0; r < rows; r++) {
        const auto* from = packed + r * packed_stride;
        const auto* by = scales + r * scale_stride;
        auto* to = out + r * blocks * BLOCK;
        wide ? wide_row(from, by, table, to, blocks) : row(from, by, table, to, blocks);
    }
}

}  // namespace

extern "C" {

void decode_bf16(const uint8_t* packed, const float* scales, const float* table, bf16* out, int64_t rows,
                 int64_t blocks, int64_t packed_stride, int64_t scale_stride, int threads) {
    decode(packed, scales, table, out, rows, blocks, packed_stride, scale_stride, threads);
}

void decode_fp32(const uint8_t* packed, const float* scales, const float* table, float* out, int64_t rows,
                 int64_t blocks, int64_t packed_stride, int64_t scale_stride, int threads) {
    decode(packed, scales, table, out, rows, blocks, packed_stride, scale_stride, threads);
}

// The nearest of sixteen numbers: how many of the fifteen bounds between them lie below; `order` tells its code.
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

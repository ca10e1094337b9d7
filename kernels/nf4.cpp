// 4-bit weights on the CPU: quantize, dequantize, and fused matmuls of up to 8 rows.
//
// A block has 64 values in 32 bytes, the first value of each byte in its upper half, and one scale: fp32, or an 8-bit
// code. Multiply-adds are not fused (-ffp-contract=off), so that results equal those of the reference in nf4.py.

#include <cmath>

#include "bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#endif

namespace {

constexpr int64_t BLOCK_SIZE = 64, BLOCK_BYTES = 32;
constexpr int64_t DOUBLE_QUANT_BLOCK = 256;  // scales per scale of the second level
constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;
constexpr int64_t SCALE_CHUNK = 64;  // blocks whose scales are dequantized at a time, with double quantization
constexpr int MAX_FUSED_ROWS = 8;    // of x, in the fused matmul
constexpr float MIN_SCALE = 1e-38f;  // avoids division by zero in blocks of zeros

// Scales (rows, blocks) of a weight: fp32, or with double quantization codes of `dynamic_map`. `outer_scales` then has
// a scale per 256 codes, and their mean as the last element. Strides are in blocks, so that column ranges can be
// dequantized. `first_block` is the index of the first block among all blocks of the full weight.
struct BlockScales {
    const void* data;
    const float *outer_scales, *dynamic_map;
    int64_t num_outer_scales, first_block, stride;

    // Scales of `count` blocks of a row, dequantized to `buffer` if necessary.
    const float* dequantize(int64_t row, int64_t block, int64_t count, float* buffer) const {
        const int64_t start = row * stride + block;
        if (outer_scales == nullptr) return (const float*)data + start;
        const auto* codes = (const uint8_t*)data + start;
        for (int64_t i = 0; i < count; i++) {
            const float scale = dynamic_map[codes[i]] * outer_scales[(first_block + start + i) / DOUBLE_QUANT_BLOCK];
            buffer[i] = scale + outer_scales[num_outer_scales];
        }
        return buffer;
    }
};

template <typename T>
void dequantize_block(const uint8_t* packed, float scale, const float* codebook, T* out) {
    T values[16];
    for (int i = 0; i < 16; i++) store_rounded(codebook[i] * scale, values[i]);
    for (int i = 0; i < BLOCK_BYTES; i++) {
        out[2 * i] = values[packed[i] >> 4];
        out[2 * i + 1] = values[packed[i] & 15];
    }
}

template <typename T>
void dequantize_blocks(const uint8_t* packed, const float* scales, const float* codebook, T* out, int64_t num_blocks) {
    for (int64_t b = 0; b < num_blocks; b++)
        dequantize_block(packed + b * BLOCK_BYTES, scales[b], codebook, out + b * BLOCK_SIZE);
}

#if defined(__x86_64__)

// Codes of 32 weights in 16-bit lanes, or of 16 weights in 32-bit lanes, upper halves of bytes first. Bits above the
// codes are undefined; lookups ignore them.
AVX512 inline __m512i unpack_32_codes(const uint8_t* packed) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)packed));
    return _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
}

AVX512 inline __m512i unpack_16_codes(const uint8_t* packed) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)packed));
    return _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
}

// The 16 values of the codes of a block are in one register, which serves as lookup table.
AVX512 void dequantize_blocks_avx512(const uint8_t* packed, const float* scales, const float* codebook, bf16* out,
                                     int64_t num_blocks) {
    const __m512 code_values = _mm512_loadu_ps(codebook);
    for (int64_t b = 0; b < num_blocks; b++) {
        const __m512 x = _mm512_mul_ps(code_values, _mm512_set1_ps(scales[b]));
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i bias = _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff));
        __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        rounded = _mm512_mask_set1_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), 0x7fc0);
        const __m512i values = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(rounded));  // twice: bit 4 is undefined
        for (int half = 0; half < 2; half++) {
            const __m512i codes = unpack_32_codes(packed + b * BLOCK_BYTES + half * 16);
            _mm512_storeu_si512(out + b * BLOCK_SIZE + half * 32, _mm512_permutexvar_epi16(codes, values));
        }
    }
}

AVX512 void dequantize_blocks_avx512(const uint8_t* packed, const float* scales, const float* codebook, float* out,
                                     int64_t num_blocks) {
    const __m512 code_values = _mm512_loadu_ps(codebook);
    for (int64_t b = 0; b < num_blocks; b++) {
        const __m512 values = _mm512_mul_ps(code_values, _mm512_set1_ps(scales[b]));
        for (int quarter = 0; quarter < 4; quarter++) {
            const __m512i codes = unpack_16_codes(packed + b * BLOCK_BYTES + quarter * 8);
            _mm512_storeu_ps(out + b * BLOCK_SIZE + quarter * 16, _mm512_permutexvar_ps(codes, values));
        }
    }
}

const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");

// Add the dot products of M rows of x with blocks of one row of the weight to `sums` (M, 16), whose columns are partial
// sums. The weight is dequantized in registers.
template <int M>
AVX512_BF16 void add_dot_products(const bf16* x, const uint8_t* packed, const float* scales, const float* codebook,
                                  float* sums, int64_t num_blocks, int64_t x_stride) {
    const __m512 code_values = _mm512_loadu_ps(codebook);
    __m512 lane_sums[M];
    for (int m = 0; m < M; m++) lane_sums[m] = _mm512_loadu_ps(sums + m * 16);
    for (int64_t b = 0; b < num_blocks; b++) {
        const __m512 values_fp32 = _mm512_mul_ps(code_values, _mm512_set1_ps(scales[b]));
        const __m512i values = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values_fp32));
        for (int half = 0; half < 2; half++) {
            const __m512i codes = unpack_32_codes(packed + b * BLOCK_BYTES + half * 16);
            const auto weight = (__m512bh)_mm512_permutexvar_epi16(codes, values);
            for (int m = 0; m < M; m++) {
                const auto* x_row = x + m * x_stride + b * BLOCK_SIZE + half * 32;
                lane_sums[m] = _mm512_dpbf16_ps(lane_sums[m], weight, (__m512bh)_mm512_loadu_si512(x_row));
            }
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(sums + m * 16, lane_sums[m]);
}

template <int M>
AVX512 void add_dot_products(const float* x, const uint8_t* packed, const float* scales, const float* codebook,
                             float* sums, int64_t num_blocks, int64_t x_stride) {
    const __m512 code_values = _mm512_loadu_ps(codebook);
    __m512 lane_sums[M];
    for (int m = 0; m < M; m++) lane_sums[m] = _mm512_loadu_ps(sums + m * 16);
    for (int64_t b = 0; b < num_blocks; b++) {
        const __m512 values = _mm512_mul_ps(code_values, _mm512_set1_ps(scales[b]));
        for (int quarter = 0; quarter < 4; quarter++) {
            const __m512i codes = unpack_16_codes(packed + b * BLOCK_BYTES + quarter * 8);
            const __m512 weight = _mm512_permutexvar_ps(codes, values);
            for (int m = 0; m < M; m++) {
                const __m512 x_row = _mm512_loadu_ps(x + m * x_stride + b * BLOCK_SIZE + quarter * 16);
                lane_sums[m] = _mm512_fmadd_ps(weight, x_row, lane_sums[m]);
            }
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(sums + m * 16, lane_sums[m]);
}

template <typename T>
using DotProductKernel = void (*)(const T*, const uint8_t*, const float*, const float*, float*, int64_t, int64_t);

template <typename T>
constexpr DotProductKernel<T> DOT_PRODUCT_KERNELS[MAX_FUSED_ROWS] = {
    add_dot_products<1>, add_dot_products<2>, add_dot_products<3>, add_dot_products<4>,
    add_dot_products<5>, add_dot_products<6>, add_dot_products<7>, add_dot_products<8>};

// Processors without bf16 dot products dequantize the weight first.
bool is_matmul_supported(bf16) { return has_avx512 && __builtin_cpu_supports("avx512bf16"); }
bool is_matmul_supported(float) { return has_avx512; }

// y = x W^T + b for x (num_tokens, num_blocks * BLOCK_SIZE), num_tokens <= MAX_FUSED_ROWS, accumulated in fp32.
template <typename T>
void matmul(const T* x, const uint8_t* packed, BlockScales scales, const float* codebook, const T* bias, T* y,
            int64_t num_tokens, int64_t num_rows, int64_t num_blocks, int64_t packed_stride, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * num_blocks * BLOCK_SIZE > MIN_PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < num_rows; r++) {
        float sums[MAX_FUSED_ROWS * 16] = {}, scale_buffer[SCALE_CHUNK];
        for (int64_t b = 0; b < num_blocks; b += SCALE_CHUNK) {
            const int64_t count = num_blocks - b < SCALE_CHUNK ? num_blocks - b : SCALE_CHUNK;
            DOT_PRODUCT_KERNELS<T>[num_tokens - 1](x + b * BLOCK_SIZE, packed + r * packed_stride + b * BLOCK_BYTES,
                                                   scales.dequantize(r, b, count, scale_buffer), codebook, sums, count,
                                                   num_blocks * BLOCK_SIZE);
        }
        for (int64_t m = 0; m < num_tokens; m++) {
            float sum = bias == nullptr ? 0 : to_float(bias[r]);
            for (int i = 0; i < 16; i++) sum += sums[m * 16 + i];
            store_rounded(sum, y[m * num_rows + r]);
        }
    }
}

#else

template <typename T>
void dequantize_blocks_avx512(const uint8_t*, const float*, const float*, T*, int64_t) {}

constexpr bool has_avx512 = false;

template <typename T>
bool is_matmul_supported(T) { return false; }

template <typename T>
void matmul(const T*, const uint8_t*, BlockScales, const float*, const T*, T*, int64_t, int64_t, int64_t, int64_t,
            int) {}

#endif

template <typename T>
void dequantize(const uint8_t* packed, BlockScales scales, const float* codebook, T* out, int64_t num_rows,
                int64_t num_blocks, int64_t packed_stride, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * num_blocks * BLOCK_SIZE > MIN_PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < num_rows; r++) {
        float scale_buffer[SCALE_CHUNK];
        for (int64_t b = 0; b < num_blocks; b += SCALE_CHUNK) {
            const int64_t count = num_blocks - b < SCALE_CHUNK ? num_blocks - b : SCALE_CHUNK;
            const float* row_scales = scales.dequantize(r, b, count, scale_buffer);
            const auto* row_packed = packed + r * packed_stride + b * BLOCK_BYTES;
            T* out_row = out + (r * num_blocks + b) * BLOCK_SIZE;
            has_avx512 ? dequantize_blocks_avx512(row_packed, row_scales, codebook, out_row, count)
                       : dequantize_blocks(row_packed, row_scales, codebook, out_row, count);
        }
    }
}

}  // namespace

#define SCALE_PARAMETERS                                                                               \
    const void *scales, const float *outer_scales, const float *dynamic_map, int64_t num_outer_scales, \
        int64_t first_block, int64_t stride
#define BLOCK_SCALES (BlockScales{scales, outer_scales, dynamic_map, num_outer_scales, first_block, stride})

extern "C" {

bool is_matmul_supported_bf16() { return is_matmul_supported(bf16()); }
bool is_matmul_supported_fp32() { return is_matmul_supported(float()); }

void matmul_bf16(const bf16* x, const uint8_t* packed, SCALE_PARAMETERS, const float* codebook, const bf16* bias,
                 bf16* y, int64_t num_tokens, int64_t num_rows, int64_t num_blocks, int64_t packed_stride,
                 int num_threads) {
    matmul(x, packed, BLOCK_SCALES, codebook, bias, y, num_tokens, num_rows, num_blocks, packed_stride, num_threads);
}

void matmul_fp32(const float* x, const uint8_t* packed, SCALE_PARAMETERS, const float* codebook, const float* bias,
                 float* y, int64_t num_tokens, int64_t num_rows, int64_t num_blocks, int64_t packed_stride,
                 int num_threads) {
    matmul(x, packed, BLOCK_SCALES, codebook, bias, y, num_tokens, num_rows, num_blocks, packed_stride, num_threads);
}

void dequantize_bf16(const uint8_t* packed, SCALE_PARAMETERS, const float* codebook, bf16* out, int64_t num_rows,
                     int64_t num_blocks, int64_t packed_stride, int num_threads) {
    dequantize(packed, BLOCK_SCALES, codebook, out, num_rows, num_blocks, packed_stride, num_threads);
}

void dequantize_fp32(const uint8_t* packed, SCALE_PARAMETERS, const float* codebook, float* out, int64_t num_rows,
                     int64_t num_blocks, int64_t packed_stride, int num_threads) {
    dequantize(packed, BLOCK_SCALES, codebook, out, num_rows, num_blocks, packed_stride, num_threads);
}

// Nearest of the 16 values: the number of midpoints below x is its rank, and `sorted_codes` maps ranks to codes.
void quantize(const float* weight, const float* midpoints, const uint8_t* sorted_codes, uint8_t* packed, float* scales,
              int64_t num_blocks, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_blocks * BLOCK_SIZE > MIN_PARALLEL_ELEMENTS)
    for (int64_t b = 0; b < num_blocks; b++) {
        const float* x = weight + b * BLOCK_SIZE;
        float absmax = 0;
        for (int i = 0; i < BLOCK_SIZE; i++) absmax = std::fabs(x[i]) > absmax ? std::fabs(x[i]) : absmax;
        scales[b] = absmax;
        const float inverse = 1.0f / (absmax > MIN_SCALE ? absmax : MIN_SCALE);
        int32_t ranks[BLOCK_SIZE] = {};
        for (int k = 0; k < 15; k++)
            for (int i = 0; i < BLOCK_SIZE; i++) ranks[i] += !(x[i] * inverse <= midpoints[k]);
        for (int i = 0; i < BLOCK_BYTES; i++)
            packed[b * BLOCK_BYTES + i] = sorted_codes[ranks[2 * i]] << 4 | sorted_codes[ranks[2 * i + 1]];
    }
}
}

// AdamW step with 8-bit moments: one pass over memory, block by block in the cache. See adamw8bit.py.
//
// Multiply-adds are not fused (-ffp-contract=off), so that codes equal those of the reference and the Triton kernel.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace {

// As in adamw8bit.py.
constexpr int BLOCK_SIZE = 256, FIRST_SHIFT = 20, SECOND_SHIFT = 19, MIN_EXPONENT = 112;
constexpr int FIRST_CODE_OFFSET = MIN_EXPONENT << 3, SECOND_CODE_OFFSET = MIN_EXPONENT << 4;  // << mantissa bits
constexpr uint32_t DITHER_STEP = 324019;
constexpr int64_t MIN_PARALLEL_BLOCKS = 64;

// The factors of AdamWHyperparams.
struct UpdateFactors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float decay, step_size, inverse_sqrt_bias_correction2, eps;  // decay: 1 - lr weight_decay
};

inline int32_t float_to_bits(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float bits_to_float(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Sum that wraps, as in torch: the bits of NaN may be larger than those of any number.
inline int32_t wrapping_add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

inline int32_t clamp(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

// Dequantize the moments of a block, update them, and update the weights.
template <typename T>
void update_block(T* weight, const T* grad, const uint8_t* first_codes, const uint8_t* second_codes,
                  const float* scales, const UpdateFactors& f, int n, float* exp_avg, float* exp_avg_sq_sqrt) {
    for (int i = 0; i < n; i++) {
        const int32_t first = first_codes[i] & 127, second = second_codes[i];
        const int32_t magnitude = first > 0 ? (first + FIRST_CODE_OFFSET) << FIRST_SHIFT : 0;
        const float m = bits_to_float(magnitude | (first_codes[i] & 128) << 24) * scales[0];
        const float sqrt_v = bits_to_float(second > 0 ? (second + SECOND_CODE_OFFSET) << SECOND_SHIFT : 0) * scales[1];
        const float g = to_float(grad[i]);
        exp_avg[i] = m * f.beta1 + g * f.one_minus_beta1;
        exp_avg_sq_sqrt[i] = std::sqrt(sqrt_v * sqrt_v * f.beta2 + g * g * f.one_minus_beta2);
        const float decayed = to_float(weight[i]) * f.decay;
        const float denom = exp_avg_sq_sqrt[i] * f.inverse_sqrt_bias_correction2 + f.eps;
        store_rounded(decayed - exp_avg[i] / denom * f.step_size, weight[i]);
    }
}

// Magnitudes are compared as integers, which vectorizes. NaN is larger than all other values.
float compute_absmax(const float* x, int n) {
    int32_t absmax = 0;
    for (int i = 0; i < n; i++) {
        const int32_t magnitude = float_to_bits(x[i]) & 0x7fffffff;
        absmax = magnitude > absmax ? magnitude : absmax;
    }
    return bits_to_float(absmax);
}

void quantize_block(const float* exp_avg, const float* exp_avg_sq_sqrt, uint8_t* first_codes, uint8_t* second_codes,
                    float* scales, int64_t step, int n) {
    const float first_scale = scales[0] = compute_absmax(exp_avg, n) / 1.875f;
    const float second_scale = scales[1] = compute_absmax(exp_avg_sq_sqrt, n) / 1.9375f;
    for (int i = 0; i < n; i++) {
        const int32_t bits = first_scale > 0 ? float_to_bits(exp_avg[i] / first_scale) : 0;
        const int32_t rounded = wrapping_add(bits & 0x7fffffff, 1 << (FIRST_SHIFT - 1));
        const int32_t code = (rounded >> FIRST_SHIFT) - FIRST_CODE_OFFSET;
        first_codes[i] = clamp(code, 0, 127) | (bits >> 24 & 128);
    }
    for (int i = 0; i < n; i++) {
        const int32_t bits = second_scale > 0 ? float_to_bits(exp_avg_sq_sqrt[i] / second_scale) : 0;
        const int32_t dither = ((uint32_t)step + i) * DITHER_STEP & ((1 << SECOND_SHIFT) - 1);
        const int32_t code = (wrapping_add(bits, dither) >> SECOND_SHIFT) - SECOND_CODE_OFFSET;
        second_codes[i] = bits > 0 ? clamp(code, 1, 255) : 0;
    }
}

// Update `numel` weights in rows of `row_length`. `scales` (2, blocks) has those of the first moment, then the second.
template <typename T>
void update_weight(T* weight, const T* grad, uint8_t* first_codes, uint8_t* second_codes, float* scales, int64_t numel,
                   int64_t row_length, const UpdateFactors& f, int64_t step, int num_threads) {
    const int64_t blocks_per_row = (row_length + BLOCK_SIZE - 1) / BLOCK_SIZE;
    const int64_t num_blocks = numel / row_length * blocks_per_row;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_blocks > MIN_PARALLEL_BLOCKS)
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t column = b % blocks_per_row * BLOCK_SIZE, start = b / blocks_per_row * row_length + column;
        const int n = row_length - column < BLOCK_SIZE ? row_length - column : BLOCK_SIZE;
        float exp_avg[BLOCK_SIZE], exp_avg_sq_sqrt[BLOCK_SIZE];
        float block_scales[2] = {scales[b], scales[num_blocks + b]};
        update_block(weight + start, grad + start, first_codes + start, second_codes + start, block_scales, f, n,
                     exp_avg, exp_avg_sq_sqrt);
        quantize_block(exp_avg, exp_avg_sq_sqrt, first_codes + start, second_codes + start, block_scales, step, n);
        scales[b] = block_scales[0], scales[num_blocks + b] = block_scales[1];
    }
}

}  // namespace

extern "C" {

void step_fp32(float* weight, const float* grad, uint8_t* first_codes, uint8_t* second_codes, float* scales,
               int64_t numel, int64_t row_length, const UpdateFactors* factors, int64_t step, int num_threads) {
    update_weight(weight, grad, first_codes, second_codes, scales, numel, row_length, *factors, step, num_threads);
}

void step_bf16(bf16* weight, const bf16* grad, uint8_t* first_codes, uint8_t* second_codes, float* scales,
               int64_t numel, int64_t row_length, const UpdateFactors* factors, int64_t step, int num_threads) {
    update_weight(weight, grad, first_codes, second_codes, scales, numel, row_length, *factors, step, num_threads);
}
}

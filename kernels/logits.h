// Vectors of 16 logits: load, scale, softcap, and store in their dtype.
//
// Files that include this may fuse multiply-adds: results are not bit-identical to a reference.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int64_t LANES = 16;
constexpr int64_t FP32_SUM_SIZE = 256 * LANES;  // values that are summed in fp32; the sums are added in double
constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float ROUNDING_OFFSET = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float MIN_EXP_INPUT = -87.0f;         // exp of smaller values is subnormal and replaced by zero

typedef float FloatVector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Uint32Vector __attribute__((vector_size(4 * LANES)));
typedef uint16_t Uint16Vector __attribute__((vector_size(2 * LANES)));

using bf16 = uint16_t;

struct LogitTransform {
    float scale, softcap;  // softcap 0: none
};

INLINE FloatVector broadcast(float x) { return x - FloatVector{}; }

INLINE FloatVector load_vector(const float* source) {
    FloatVector x;
    std::memcpy(&x, source, sizeof x);
    return x;
}

INLINE FloatVector load_vector(const bf16* source) {
    Uint16Vector x;
    std::memcpy(&x, source, sizeof x);
    return (FloatVector)(__builtin_convertvector(x, Uint32Vector) << 16);
}

INLINE void store_vector(FloatVector x, float* out) { std::memcpy(out, &x, sizeof x); }

INLINE void store_vector(FloatVector x, bf16* out) {
    const Uint32Vector bits = (Uint32Vector)x;
    const Uint32Vector rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Uint16Vector values = __builtin_convertvector(x == x ? rounded : Uint32Vector{} + 0x7fc0, Uint16Vector);
    std::memcpy(out, &values, sizeof values);
}

template <typename T>
INLINE float load_scalar(const T* source) {
    T values[LANES] = {*source};
    return load_vector(values)[0];
}

template <typename T>
INLINE void store_scalar(float x, T* out) {
    T values[LANES];
    store_vector(broadcast(x), values);
    *out = values[0];
}

// 2^n exp(r) with |r| <= ln 2 / 2; the error of the polynomial is 4e-9. For x <= 88.
INLINE FloatVector exp(FloatVector x) {
    const FloatVector shifted = x * LOG2E + ROUNDING_OFFSET;
    const FloatVector n = shifted - ROUNDING_OFFSET;
    const FloatVector r = x - n * LN2_HIGH - n * LN2_LOW;
    FloatVector p = r * 0.001381459878757596f + 0.0083687175065279f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    p = p * (r * r) + r + 1.0f;
    const FloatVector result = (FloatVector)((Uint32Vector)p + ((Uint32Vector)shifted << 23));
    return x > MIN_EXP_INPUT ? result : (x <= MIN_EXP_INPUT ? FloatVector{} : x);  // propagates NaN
}

// tanh. Uses a polynomial near zero (error 9e-9), where the other formula cancels.
INLINE FloatVector tanh(FloatVector x) {
    const FloatVector magnitude = x < 0.0f ? -x : x;
    const FloatVector z = x * x;
    FloatVector p = z * -0.00570498313754797f + 0.0206390842795372f;
    p = p * z + -0.05373971536755562f;
    p = p * z + 0.13331441581249237f;
    p = p * z + -0.3333328068256378f;
    const FloatVector polynomial = x + x * z * p;
    const FloatVector clamped = magnitude < 10.0f ? magnitude : broadcast(10.0f);
    const FloatVector positive = 1.0f - 2.0f / (exp(clamped * 2.0f) + 1.0f);
    const FloatVector result = magnitude < 0.625f ? polynomial : (x < 0.0f ? -positive : positive);
    return x == x ? result : x;
}

// Softcapped logit of a scaled one, and its derivative with respect to the raw logit.
template <bool HAS_SOFTCAP>
INLINE FloatVector apply_softcap(FloatVector x, const LogitTransform& transform, FloatVector* derivative) {
    *derivative = broadcast(transform.scale);
    if (!HAS_SOFTCAP) return x;
    x = tanh(x / transform.softcap);
    *derivative *= 1.0f - x * x;
    return x * transform.softcap;
}

template <typename T>
INLINE float compute_max_scaled_logit(const T* logits, int64_t vocab_size, float scale) {
    FloatVector lane_max = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= vocab_size; i += LANES) {
        const FloatVector x = load_vector(logits + i) * scale;
        lane_max = lane_max > x ? lane_max : x;
    }
    for (; i < vocab_size; i++) {
        const FloatVector x = broadcast(load_scalar(logits + i) * scale);
        lane_max = lane_max > x ? lane_max : x;
    }
    float max_logit = lane_max[0];
    for (int k = 1; k < LANES; k++) max_logit = max_logit > lane_max[k] ? max_logit : lane_max[k];
    return max_logit;
}

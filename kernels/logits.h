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
constexpr int64_t BLOCK = 256 * LANES;  // values that are summed in fp32; the sums are added in double
constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float LEAST = -87.0f;       // exp of smaller values is subnormal and replaced by zero

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

using bf16 = uint16_t;

struct Cap {
    float scale, softcap;  // softcap 0: none
};

INLINE Floats same(float x) { return x - Floats{}; }

INLINE Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

INLINE Floats load(const bf16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}

INLINE void store(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }

INLINE void store(Floats x, bf16* to) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves top = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &top, sizeof top);
}

template <typename T>
INLINE float one(const T* from) {
    T many[LANES] = {*from};
    return load(many)[0];
}

template <typename T>
INLINE void put(float x, T* to) {
    T many[LANES];
    store(same(x), many);
    *to = many[0];
}

// 2^n exp(r) with |r| <= ln 2 / 2; the error of the polynomial is 4e-9. For x <= 88.
INLINE Floats exp(Floats x) {
    const Floats shifted = x * LOG2E + ROUND;
    const Floats n = shifted - ROUND;
    const Floats r = x - n * LN2_HIGH - n * LN2_LOW;
    Floats p = r * 0.001381459878757596f + 0.0083687175065279f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    p = p * (r * r) + r + 1.0f;
    const Floats found = (Floats)((Words)p + ((Words)shifted << 23));
    return x > LEAST ? found : (x <= LEAST ? Floats{} : x);  // propagates NaN
}

// tanh. Uses a polynomial near zero (error 9e-9), where the other formula cancels.
INLINE Floats tanh(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats z = x * x;
    Floats p = z * -0.00570498313754797f + 0.0206390842795372f;
    p = p * z + -0.05373971536755562f;
    p = p * z + 0.13331441581249237f;
    p = p * z + -0.3333328068256378f;
    const Floats near = x + x * z * p;
    const Floats far = 1.0f - 2.0f / (exp((size < 10.0f ? size : same(10.0f)) * 2.0f) + 1.0f);
    const Floats found = size < 0.625f ? near : (x < 0.0f ? -far : far);
    return x == x ? found : x;
}

// Softcapped logit of a scaled one, and its derivative with respect to the raw logit.
template <bool CAP>
INLINE Floats capped(Floats x, const Cap& cap, Floats* slope) {
    *slope = same(cap.scale);
    if (!CAP) return x;
    x = tanh(x / cap.softcap);
    *slope *= 1.0f - x * x;
    return x * cap.softcap;
}

template <typename T>
INLINE float largest(const T* logits, int64_t vocab, float scale) {
    Floats most = same(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        const Floats x = load(logits + i) * scale;
        most = most > x ? most : x;
    }
    for (; i < vocab; i++) {
        const Floats x = same(one(logits + i) * scale);
        most = most > x ? most : x;
    }
    float found = most[0];
    for (int k = 1; k < LANES; k++) found = found > most[k] ? found : most[k];
    return found;
}

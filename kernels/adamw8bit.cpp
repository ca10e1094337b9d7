// AdamW step with 8-bit moments: one pass over memory, block by block in the cache. See adamw8bit.py.
//
// Multiply-adds are not fused (-ffp-contract=off), so that codes equal those of the reference and the Triton kernel.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "bf16.h"

namespace {

constexpr int BLOCK = 256, FIRST = 20, SECOND = 19, LOW = 112;
constexpr uint32_t TURN = 324019;
constexpr int64_t FEW = 64;  // blocks per thread, at least

struct Factors {
    float keep, fresh, keep_square, fresh_square, shrink, size, correct, eps;
};

inline int32_t bits(float x) {
    int32_t out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}

inline float real(int32_t x) {
    float out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}

// Sum that wraps, as in torch: the bits of NaN may be larger than those of any number.
inline int32_t plus(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

inline int32_t within(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

// Decode the moments of a block, update them, and update the weights.
template <typename T>
void move(T* w, const T* g, const uint8_t* first, const uint8_t* second, const float* scales, const Factors& f, int n,
          float* m, float* root) {
    for (int i = 0; i < n; i++) {
        const int32_t a = first[i] & 127, b = second[i];
        const float sized = real((a > 0 ? (a + (LOW << 3)) << FIRST : 0) | (first[i] & 128) << 24) * scales[0];
        const float old = real(b > 0 ? (b + (LOW << 4)) << SECOND : 0) * scales[1];
        const float grad = to_float(g[i]);
        m[i] = sized * f.keep + grad * f.fresh;
        root[i] = std::sqrt(old * old * f.keep_square + grad * grad * f.fresh_square);
        store_rounded(to_float(w[i]) * f.shrink - m[i] / (root[i] * f.correct + f.eps) * f.size, w[i]);
    }
}

// Magnitudes are compared as integers, which vectorizes. NaN is larger than all other values.
float largest(const float* x, int n) {
    int32_t top = 0;
    for (int i = 0; i < n; i++) {
        const int32_t size = bits(x[i]) & 0x7fffffff;
        top = size > top ? size : top;
    }
    return real(top);
}

void encode(const float* m, const float* root, uint8_t* first, uint8_t* second, float* scales, int64_t step, int n) {
    const float a = scales[0] = largest(m, n) / 1.875f, b = scales[1] = largest(root, n) / 1.9375f;
    for (int i = 0; i < n; i++) {
        const int32_t x = a > 0 ? bits(m[i] / a) : 0;
        const int32_t size = (plus(x & 0x7fffffff, 1 << (FIRST - 1)) >> FIRST) - (LOW << 3);
        first[i] = within(size, 0, 127) | (x >> 24 & 128);
    }
    for (int i = 0; i < n; i++) {
        const int32_t x = b > 0 ? bits(root[i] / b) : 0;
        const int32_t up = ((uint32_t)step + i) * TURN & ((1 << SECOND) - 1);
        const int32_t size = (plus(x, up) >> SECOND) - (LOW << 4);
        second[i] = x > 0 ? within(size, 1, 255) : 0;
    }
}

template <typename T>
void run(T* w, const T* g, uint8_t* first, uint8_t* second, float* scales, int64_t count, int64_t row,
         const Factors& f, int64_t step, int threads) {
    const int64_t of_row = (row + BLOCK - 1) / BLOCK, blocks = count / row * of_row;
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks > FEW)
    for (int64_t k = 0; k < blocks; k++) {
        const int64_t behind = k % of_row * BLOCK, at = k / of_row * row + behind;
        const int n = row - behind < BLOCK ? row - behind : BLOCK;
        float m[BLOCK], root[BLOCK], own[2] = {scales[k], scales[blocks + k]};
        move(w + at, g + at, first + at, second + at, own, f, n, m, root);
        encode(m, root, first + at, second + at, own, step, n);
        scales[k] = own[0], scales[blocks + k] = own[1];
    }
}

}  // namespace

extern "C" {

void step_fp32(float* w, const float* g, uint8_t* first, uint8_t* second, float* scales, int64_t count, int64_t row,
               const Factors* factors, int64_t step, int threads) {
    run(w, g, first, second, scales, count, row, *factors, step, threads);
}

void step_bf16(bf16* w, const bf16* g, uint8_t* first, uint8_t* second, float* scales, int64_t count, int64_t row,
               const Factors* factors, int64_t step, int threads) {
    run(w, g, first, second, scales, count, row, *factors, step, threads);
}
}

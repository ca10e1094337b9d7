// RoPE: rotation of channel pairs by the angles of their token, computed in fp32.

#include "bf16.h"

namespace {

constexpr int64_t FEW = 1 << 14;  // elements per thread, at least

struct Sizes {
    int64_t tokens, heads, dim, half, start;  // `half` pairs from channel `start` are rotated, others copied
    int64_t token_stride, head_stride;        // of the input; the output is contiguous
    float sign;                               // -1: inverse rotation
    bool paired_in, paired_out;               // pairs are adjacent channels, not half of the channels apart
    int threads;
};

// Rotates the pairs [begin, begin + N) of a head. A constant number fills vector registers also if heads are small.
template <int64_t N, bool PAIRED_IN, bool PAIRED_OUT, typename T>
void rotate_pairs(const T* __restrict x, T* __restrict y, const float* cos, const float* sin, float sign, int64_t half,
                  int64_t begin) {
    for (int64_t j = 0; j < N; j++) {
        const int64_t i = begin + j;
        const float a = to_float(x[PAIRED_IN ? 2 * i : i]), b = to_float(x[PAIRED_IN ? 2 * i + 1 : i + half]);
        const float s = sin[i] * sign;
        store_rounded(a * cos[i] - b * s, y[PAIRED_OUT ? 2 * i : i]);
        store_rounded(b * cos[i] + a * s, y[PAIRED_OUT ? 2 * i + 1 : i + half]);
    }
}

template <bool PAIRED_IN, bool PAIRED_OUT, typename T>
void rotate_head(const T* x, T* y, const float* cos, const float* sin, float sign, int64_t half) {
    int64_t i = 0;
    for (; i + 32 <= half; i += 32) rotate_pairs<32, PAIRED_IN, PAIRED_OUT>(x, y, cos, sin, sign, half, i);
    for (; i + 16 <= half; i += 16) rotate_pairs<16, PAIRED_IN, PAIRED_OUT>(x, y, cos, sin, sign, half, i);
    for (; i < half; i++) rotate_pairs<1, PAIRED_IN, PAIRED_OUT>(x, y, cos, sin, sign, half, i);
}

template <typename T>
void rotate(const T* x, T* y, const float* cos, const float* sin, const Sizes& s) {
    const auto step = s.paired_in ? s.paired_out ? rotate_head<true, true, T> : rotate_head<true, false, T>
                                  : s.paired_out ? rotate_head<false, true, T> : rotate_head<false, false, T>;
    const int64_t end = s.start + 2 * s.half;
#pragma omp parallel for num_threads(s.threads) if (s.tokens * s.heads * s.dim > FEW)
    for (int64_t t = 0; t < s.tokens; t++) {
        for (int64_t h = 0; h < s.heads; h++) {
            const T* from = x + t * s.token_stride + h * s.head_stride;
            T* to = y + (t * s.heads + h) * s.dim;
            std::memcpy(to, from, s.start * sizeof(T));
            step(from + s.start, to + s.start, cos + t * s.half, sin + t * s.half, s.sign, s.half);
            std::memcpy(to + end, from + end, (s.dim - end) * sizeof(T));
        }
    }
}

}  // namespace

extern "C" {

void rotate_fp32(const float* x, float* y, const float* cos, const float* sin, const Sizes* s) {
    rotate(x, y, cos, sin, *s);
}

void rotate_bf16(const bf16* x, bf16* y, const float* cos, const float* sin, const Sizes* s) {
    rotate(x, y, cos, sin, *s);
}
}

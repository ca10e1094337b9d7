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

template <bool PAIRED_IN, bool PAIRED_OUT, typename T>
void turn(const T* from, T* to, const float* cos, const float* sin, float sign, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = number(from[PAIRED_IN ? 2 * i : i]), b = number(from[PAIRED_IN ? 2 * i + 1 : i + half]);
        const float s = sin[i] * sign;
        round(a * cos[i] - b * s, to[PAIRED_OUT ? 2 * i : i]);
        round(b * cos[i] + a * s, to[PAIRED_OUT ? 2 * i + 1 : i + half]);
    }
}

template <typename T>
void rotate(const T* x, T* y, const float* cos, const float* sin, const Sizes& s) {
    const auto step = s.paired_in ? s.paired_out ? turn<true, true, T> : turn<true, false, T>
                                  : s.paired_out ? turn<false, true, T> : turn<false, false, T>;
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

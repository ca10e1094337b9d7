// RoPE: rotation of channel pairs by the angles of their token, computed in fp32.

#include "bf16.h"

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 14;

struct RopeSizes {
    int64_t num_tokens, num_heads, head_dim;
    int64_t num_pairs, start;           // channels [start, start + 2 * num_pairs) are rotated, others copied
    int64_t token_stride, head_stride;  // of the input; the output is contiguous
    float sign;                         // -1: inverse rotation
    bool is_input_interleaved, is_output_interleaved;  // pairs are adjacent channels, not num_pairs channels apart
    int num_threads;
};

// Rotates the pairs [begin, begin + N) of a head. A constant number fills vector registers also if heads are small.
template <int64_t N, bool IS_INPUT_INTERLEAVED, bool IS_OUTPUT_INTERLEAVED, typename T>
void rotate_pairs(const T* __restrict x, T* __restrict y, const float* cos, const float* sin, float sign,
                  int64_t num_pairs, int64_t begin) {
    for (int64_t j = 0; j < N; j++) {
        const int64_t i = begin + j;
        const float a = to_float(x[IS_INPUT_INTERLEAVED ? 2 * i : i]);
        const float b = to_float(x[IS_INPUT_INTERLEAVED ? 2 * i + 1 : i + num_pairs]);
        const float signed_sin = sin[i] * sign;
        store_rounded(a * cos[i] - b * signed_sin, y[IS_OUTPUT_INTERLEAVED ? 2 * i : i]);
        store_rounded(b * cos[i] + a * signed_sin, y[IS_OUTPUT_INTERLEAVED ? 2 * i + 1 : i + num_pairs]);
    }
}

template <bool IN, bool OUT, typename T>
void rotate_head(const T* x, T* y, const float* cos, const float* sin, float sign, int64_t num_pairs) {
    int64_t i = 0;
    for (; i + 32 <= num_pairs; i += 32) rotate_pairs<32, IN, OUT>(x, y, cos, sin, sign, num_pairs, i);
    for (; i + 16 <= num_pairs; i += 16) rotate_pairs<16, IN, OUT>(x, y, cos, sin, sign, num_pairs, i);
    for (; i + 8 <= num_pairs; i += 8) rotate_pairs<8, IN, OUT>(x, y, cos, sin, sign, num_pairs, i);
    for (; i < num_pairs; i++) rotate_pairs<1, IN, OUT>(x, y, cos, sin, sign, num_pairs, i);
}

template <typename T>
void rotate(const T* x, T* y, const float* cos, const float* sin, const RopeSizes& s) {
    const auto kernel =
        s.is_input_interleaved
            ? s.is_output_interleaved ? rotate_head<true, true, T> : rotate_head<true, false, T>
            : s.is_output_interleaved ? rotate_head<false, true, T> : rotate_head<false, false, T>;
    const int64_t end = s.start + 2 * s.num_pairs;
    [[maybe_unused]] const int64_t numel = s.num_tokens * s.num_heads * s.head_dim;  // without OpenMP
#pragma omp parallel for num_threads(s.num_threads) if (numel > MIN_PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < s.num_tokens; t++) {
        for (int64_t h = 0; h < s.num_heads; h++) {
            const T* x_head = x + t * s.token_stride + h * s.head_stride;
            T* y_head = y + (t * s.num_heads + h) * s.head_dim;
            std::memcpy(y_head, x_head, s.start * sizeof(T));
            kernel(x_head + s.start, y_head + s.start, cos + t * s.num_pairs, sin + t * s.num_pairs, s.sign,
                   s.num_pairs);
            std::memcpy(y_head + end, x_head + end, (s.head_dim - end) * sizeof(T));
        }
    }
}

}  // namespace

extern "C" {

void rotate_fp32(const float* x, float* y, const float* cos, const float* sin, const RopeSizes* s) {
    rotate(x, y, cos, sin, *s);
}

void rotate_bf16(const bf16* x, bf16* y, const float* cos, const float* sin, const RopeSizes* s) {
    rotate(x, y, cos, sin, *s);
}
}

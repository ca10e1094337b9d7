// RMSNorm of rows, forward and backward, computed in fp32.

#include <cmath>

#include "bf16.h"

namespace {

constexpr int64_t LANES = 32;     // independent partial sums, which compilers may not introduce
constexpr int64_t ROWS = 64;      // rows whose weight gradients are summed together, for any number of threads
constexpr int64_t FEW = 1 << 14;  // elements per thread, at least

struct Sizes {
    int64_t rows, dim, x_stride, grad_stride;
    float eps, offset;
    bool late;  // multiply by the weight in fp32, before rounding
    int threads;
};

template <typename F>
float sum(int64_t dim, F term) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int64_t j = 0; j < LANES; j++) lanes[j] += term(i + j);
    for (int64_t j = 0; i + j < dim; j++) lanes[j] += term(i + j);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t j = 0; j < half; j++) lanes[j] += lanes[j + half];
    return lanes[0];
}

template <typename T, typename W>
float factor(const W* weight, int64_t i, const Sizes& s) {
    return s.late ? to_float(weight[i]) + s.offset : round_to<T>(to_float(weight[i]));
}

template <typename T, typename W>
void forward(const T* x, const W* weight, T* y, float* rstd, const Sizes& s) {
#pragma omp parallel for num_threads(s.threads) if (s.rows * s.dim > FEW)
    for (int64_t r = 0; r < s.rows; r++) {
        const T* from = x + r * s.x_stride;
        T* to = y + r * s.dim;
        const float squares = sum(s.dim, [=](int64_t i) { return to_float(from[i]) * to_float(from[i]); });
        const float by = rstd[r] = 1 / std::sqrt(squares / s.dim + s.eps);
        if (!weight)
            for (int64_t i = 0; i < s.dim; i++) store_rounded(to_float(from[i]) * by, to[i]);
        else if (s.late)
            for (int64_t i = 0; i < s.dim; i++) store_rounded(to_float(from[i]) * by * (to_float(weight[i]) + s.offset), to[i]);
        else
            for (int64_t i = 0; i < s.dim; i++)
                store_rounded(round_to<T>(to_float(from[i]) * by) * round_to<T>(to_float(weight[i])), to[i]);
    }
}

// With h = x rstd and g = grad weight, the gradient of x is rstd (g - h mean(g h)), that of the weight is grad h.
// `to_weight` (rows / ROWS, dim) receives sums over ROWS rows each, in a fixed order.
template <typename T, typename W>
void backward(const T* grad, const T* x, const W* weight, const float* rstd, T* to_x, float* to_weight,
              const Sizes& s) {
#pragma omp parallel for num_threads(s.threads) if (s.rows * s.dim > FEW)
    for (int64_t block = 0; block < (s.rows + ROWS - 1) / ROWS; block++) {
        const int64_t end = (block + 1) * ROWS < s.rows ? (block + 1) * ROWS : s.rows;
        float* sums = to_weight ? to_weight + block * s.dim : nullptr;
        if (sums)
            for (int64_t i = 0; i < s.dim; i++) sums[i] = 0;
        for (int64_t r = block * ROWS; r < end; r++) {
            const T *from = x + r * s.x_stride, *g = grad + r * s.grad_stride;
            const float by = rstd[r];
            if (sums)
                for (int64_t i = 0; i < s.dim; i++) sums[i] += to_float(g[i]) * (to_float(from[i]) * by);
            if (!to_x) continue;
            T* to = to_x + r * s.dim;
            auto scaled = [=](int64_t i) { return weight ? to_float(g[i]) * factor<T>(weight, i, s) : to_float(g[i]); };
            const float dot = sum(s.dim, [=](int64_t i) { return scaled(i) * to_float(from[i]); });
            const float along = dot * by * by / s.dim;
            for (int64_t i = 0; i < s.dim; i++) store_rounded((scaled(i) - to_float(from[i]) * along) * by, to[i]);
        }
    }
}

}  // namespace

#define NORM(T, W, NAME)                                                                                             \
    void forward_##NAME(const T* x, const W* weight, T* y, float* rstd, const Sizes* s) {                            \
        forward(x, weight, y, rstd, *s);                                                                             \
    }                                                                                                                \
    void backward_##NAME(const T* grad, const T* x, const W* weight, const float* rstd, T* to_x, float* to_weight,   \
                         const Sizes* s) {                                                                           \
        backward(grad, x, weight, rstd, to_x, to_weight, *s);                                                        \
    }

extern "C" {
NORM(float, float, fp32_fp32)
NORM(float, bf16, fp32_bf16)
NORM(bf16, float, bf16_fp32)
NORM(bf16, bf16, bf16_bf16)
}

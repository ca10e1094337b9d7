// RMSNorm of rows, forward and backward, computed in fp32.

#include <cmath>

#include "bf16.h"

namespace {

constexpr int64_t LANES = 32;         // independent partial sums, which compilers may not introduce
constexpr int64_t ROWS_PER_SUM = 64;  // rows whose weight gradients are summed together, for any number of threads
constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 14;

struct NormSizes {
    int64_t num_rows, dim, x_stride, grad_stride;
    float eps, offset;
    bool is_scaled_in_fp32;  // multiply by weight + offset in fp32, before rounding
    int num_threads;
};

template <typename F>
float sum_terms(int64_t dim, F compute_term) {
    float sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int64_t j = 0; j < LANES; j++) sums[j] += compute_term(i + j);
    for (int64_t j = 0; i + j < dim; j++) sums[j] += compute_term(i + j);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}

template <typename T, typename W>
float load_weight(const W* weight, int64_t i, const NormSizes& s) {
    return s.is_scaled_in_fp32 ? to_float(weight[i]) + s.offset : round_to<T>(to_float(weight[i]));
}

template <typename T, typename W>
void forward(const T* x, const W* weight, T* y, float* rstd, const NormSizes& s) {
#pragma omp parallel for num_threads(s.num_threads) if (s.num_rows * s.dim > MIN_PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < s.num_rows; r++) {
        const T* x_row = x + r * s.x_stride;
        T* y_row = y + r * s.dim;
        const float sum_squares = sum_terms(s.dim, [=](int64_t i) { return to_float(x_row[i]) * to_float(x_row[i]); });
        const float row_rstd = rstd[r] = 1 / std::sqrt(sum_squares / s.dim + s.eps);
        if (!weight)
            for (int64_t i = 0; i < s.dim; i++) store_rounded(to_float(x_row[i]) * row_rstd, y_row[i]);
        else if (s.is_scaled_in_fp32)
            for (int64_t i = 0; i < s.dim; i++)
                store_rounded(to_float(x_row[i]) * row_rstd * (to_float(weight[i]) + s.offset), y_row[i]);
        else
            for (int64_t i = 0; i < s.dim; i++)
                store_rounded(round_to<T>(to_float(x_row[i]) * row_rstd) * round_to<T>(to_float(weight[i])), y_row[i]);
    }
}

// With x_hat = x rstd and wdy = weight dy, dx = rstd (wdy - x_hat mean(wdy x_hat)), and dw is the sum of dy x_hat.
// `grad_weight_sums` (num_rows / ROWS_PER_SUM, dim) receives sums over ROWS_PER_SUM rows each, in a fixed order.
template <typename T, typename W>
void backward(const T* grad_output, const T* x, const W* weight, const float* rstd, T* grad_x,
              float* grad_weight_sums, const NormSizes& s) {
#pragma omp parallel for num_threads(s.num_threads) if (s.num_rows * s.dim > MIN_PARALLEL_ELEMENTS)
    for (int64_t block = 0; block < (s.num_rows + ROWS_PER_SUM - 1) / ROWS_PER_SUM; block++) {
        const int64_t end = (block + 1) * ROWS_PER_SUM < s.num_rows ? (block + 1) * ROWS_PER_SUM : s.num_rows;
        float* dw = grad_weight_sums ? grad_weight_sums + block * s.dim : nullptr;
        if (dw)
            for (int64_t i = 0; i < s.dim; i++) dw[i] = 0;
        for (int64_t r = block * ROWS_PER_SUM; r < end; r++) {
            const T *x_row = x + r * s.x_stride, *dy = grad_output + r * s.grad_stride;
            const float row_rstd = rstd[r];
            if (dw)
                for (int64_t i = 0; i < s.dim; i++) dw[i] += to_float(dy[i]) * (to_float(x_row[i]) * row_rstd);
            if (!grad_x) continue;
            T* dx = grad_x + r * s.dim;
            auto wdy = [=](int64_t i) {
                return weight ? to_float(dy[i]) * load_weight<T>(weight, i, s) : to_float(dy[i]);
            };
            const float dot = sum_terms(s.dim, [=](int64_t i) { return wdy(i) * to_float(x_row[i]); });
            const float projection = dot * row_rstd * row_rstd / s.dim;  // mean(wdy x_hat) rstd
            for (int64_t i = 0; i < s.dim; i++)
                store_rounded((wdy(i) - to_float(x_row[i]) * projection) * row_rstd, dx[i]);
        }
    }
}

}  // namespace

#define DEFINE_NORM(T, W, NAME)                                                                           \
    void forward_##NAME(const T* x, const W* weight, T* y, float* rstd, const NormSizes* s) {             \
        forward(x, weight, y, rstd, *s);                                                                  \
    }                                                                                                     \
    void backward_##NAME(const T* grad_output, const T* x, const W* weight, const float* rstd, T* grad_x, \
                         float* grad_weight_sums, const NormSizes* s) {                                   \
        backward(grad_output, x, weight, rstd, grad_x, grad_weight_sums, *s);                             \
    }

extern "C" {
DEFINE_NORM(float, float, fp32_fp32)
DEFINE_NORM(float, bf16, fp32_bf16)
DEFINE_NORM(bf16, float, bf16_fp32)
DEFINE_NORM(bf16, bf16, bf16_bf16)
}

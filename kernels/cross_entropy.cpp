// Cross-entropy of tokens on the CPU; gradients are written over the logits. A row is read three times, from the cache.
//
// Vectors of 16 floats, which compilers split to the width of the processor. The order of sums is fixed, so results
// do not depend on the number of threads. Multiply-adds are fused, which saves a third of the time.

#include "logits.h"

namespace {

struct CrossEntropyTerms : LogitTransform {
    float smoothing, z_loss;
};

// Sums over the logits x of a row, with m the maximum of x.
struct RowSums {
    double exp = 0, shifted = 0;  // of exp(x - m) and of x - m
    double shifted_exp = 0;       // of (x - m) exp(x - m)
};

template <typename T, bool HAS_SOFTCAP, bool NEEDS_ENTROPY = false>
INLINE RowSums sum_row(const T* logits, int64_t vocab_size, float max_logit, const CrossEntropyTerms& terms) {
    RowSums sums;
    FloatVector unused;
    int64_t i = 0;
    while (i + LANES <= vocab_size) {
        const int64_t stop = vocab_size - i < FP32_SUM_SIZE ? vocab_size / LANES * LANES : i + FP32_SUM_SIZE;
        FloatVector exp_sums = {}, shifted_sums = {}, shifted_exp_sums = {};
        for (; i < stop; i += LANES) {
            const FloatVector scaled = load_vector(logits + i) * terms.scale;
            const FloatVector x = apply_softcap<HAS_SOFTCAP>(scaled, terms, &unused) - max_logit;
            const FloatVector e = exp(x);
            exp_sums += e;
            shifted_sums += x;
            if (NEEDS_ENTROPY) shifted_exp_sums += e * (x <= MIN_EXP_INPUT ? FloatVector{} : x);  // 0 * -inf is NaN
        }
        for (int k = 0; k < LANES; k++) {
            sums.exp += exp_sums[k];
            sums.shifted += shifted_sums[k];
            sums.shifted_exp += shifted_exp_sums[k];
        }
    }
    for (; i < vocab_size; i++) {
        const FloatVector scaled = broadcast(load_scalar(logits + i) * terms.scale);
        const FloatVector x = apply_softcap<HAS_SOFTCAP>(scaled, terms, &unused) - max_logit;
        const float e = exp(x)[0];
        sums.exp += e;
        sums.shifted += x[0];
        if (NEEDS_ENTROPY) sums.shifted_exp += x[0] <= MIN_EXP_INPUT ? 0.0f : e * x[0];
    }
    return sums;
}

// Gradient with respect to a softcapped logit x: exp_factor exp(x - max_logit) - smoothing, and another -target for the
// logit of the target.
struct GradientTerms {
    float max_logit, exp_factor, smoothing, target;
};

template <bool HAS_SOFTCAP>
INLINE FloatVector compute_grad_logits(FloatVector logits, const GradientTerms& grad, const CrossEntropyTerms& terms) {
    FloatVector derivative;
    const FloatVector x = apply_softcap<HAS_SOFTCAP>(logits * terms.scale, terms, &derivative);
    return (exp(x - grad.max_logit) * grad.exp_factor - grad.smoothing) * derivative;
}

template <typename T, bool HAS_SOFTCAP>
INLINE void write_grad_logits(T* logits, int64_t target, int64_t vocab_size, const GradientTerms& grad,
                              const CrossEntropyTerms& terms) {
    GradientTerms target_grad = grad;
    target_grad.smoothing += grad.target;
    const FloatVector target_logit = broadcast(load_scalar(logits + target));
    const float grad_target_logit = compute_grad_logits<HAS_SOFTCAP>(target_logit, target_grad, terms)[0];
    int64_t i = 0;
    for (; i + LANES <= vocab_size; i += LANES)
        store_vector(compute_grad_logits<HAS_SOFTCAP>(load_vector(logits + i), grad, terms), logits + i);
    for (; i < vocab_size; i++)
        store_scalar(compute_grad_logits<HAS_SOFTCAP>(broadcast(load_scalar(logits + i)), grad, terms)[0], logits + i);
    store_scalar(grad_target_logit, logits + target);
}

template <typename T, bool HAS_SOFTCAP>
float compute_loss(T* logits, int64_t target, int64_t vocab_size, float weight, const CrossEntropyTerms& terms,
                   bool needs_gradient) {
    FloatVector unused;
    const float max_scaled_logit = compute_max_scaled_logit(logits, vocab_size, terms.scale);
    const float max_logit = apply_softcap<HAS_SOFTCAP>(broadcast(max_scaled_logit), terms, &unused)[0];
    const RowSums sums = sum_row<T, HAS_SOFTCAP>(logits, vocab_size, max_logit, terms);
    const FloatVector scaled_target = broadcast(load_scalar(logits + target) * terms.scale);
    const double target_logit = apply_softcap<HAS_SOFTCAP>(scaled_target, terms, &unused)[0] - max_logit;
    const double log_sum = std::log(sums.exp), logsumexp = max_logit + log_sum;
    const double target_weight = 1.0 - terms.smoothing, smoothing = terms.smoothing / double(vocab_size);
    const double exp_factor = (1.0 + 2.0 * terms.z_loss * logsumexp) / sums.exp;
    const GradientTerms grad = {max_logit, float(weight * exp_factor), float(weight * smoothing),
                                float(weight * target_weight)};
    if (needs_gradient) write_grad_logits<T, HAS_SOFTCAP>(logits, target, vocab_size, grad, terms);
    const double smoothing_loss = terms.smoothing > 0 ? smoothing * sums.shifted : 0.0;
    return log_sum - target_weight * target_logit - smoothing_loss + terms.z_loss * logsumexp * logsumexp;
}

template <typename T, bool HAS_SOFTCAP>
float compute_entropy(const T* logits, int64_t vocab_size, const CrossEntropyTerms& terms) {
    FloatVector unused;
    const float max_scaled_logit = compute_max_scaled_logit(logits, vocab_size, terms.scale);
    const float max_logit = apply_softcap<HAS_SOFTCAP>(broadcast(max_scaled_logit), terms, &unused)[0];
    const RowSums sums = sum_row<T, HAS_SOFTCAP, true>(logits, vocab_size, max_logit, terms);
    return std::log(sums.exp) - sums.shifted_exp / sums.exp;
}

template <typename T>
void compute_entropies(const T* logits, float* entropies, int64_t num_rows, int64_t vocab_size, int64_t stride,
                       const CrossEntropyTerms& terms, int num_threads) {
    const auto kernel = terms.softcap > 0 ? compute_entropy<T, true> : compute_entropy<T, false>;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < num_rows; r++) entropies[r] = kernel(logits + r * stride, vocab_size, terms);
}

template <typename T>
int64_t compute_losses(T* logits, const int64_t* targets, const float* weights, float* losses, int64_t num_rows,
                       int64_t vocab_size, int64_t stride, const CrossEntropyTerms& terms, bool needs_gradient,
                       int num_threads) {
    const auto kernel = terms.softcap > 0 ? compute_loss<T, true> : compute_loss<T, false>;
    int64_t num_invalid = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : num_invalid) schedule(dynamic, 4)
    for (int64_t r = 0; r < num_rows; r++) {
        T* row = logits + r * stride;
        num_invalid += targets[r] >= vocab_size;
        if (targets[r] >= 0 && targets[r] < vocab_size) {
            losses[r] = kernel(row, targets[r], vocab_size, weights ? weights[r] : 1.0f, terms, needs_gradient);
        } else {
            losses[r] = 0;
            if (needs_gradient && vocab_size) std::memset(row, 0, vocab_size * sizeof(T));
        }
    }
    return num_invalid;
}

}  // namespace

extern "C" {

// Returns the number of targets that are not in the vocabulary. `weights` may be null: all weights are 1.
int64_t compute_losses_bf16(bf16* logits, const int64_t* targets, const float* weights, float* losses,
                            const CrossEntropyTerms* terms, int64_t num_rows, int64_t vocab_size, int64_t stride,
                            int needs_gradient, int num_threads) {
    return compute_losses(logits, targets, weights, losses, num_rows, vocab_size, stride, *terms, needs_gradient,
                          num_threads);
}

int64_t compute_losses_fp32(float* logits, const int64_t* targets, const float* weights, float* losses,
                            const CrossEntropyTerms* terms, int64_t num_rows, int64_t vocab_size, int64_t stride,
                            int needs_gradient, int num_threads) {
    return compute_losses(logits, targets, weights, losses, num_rows, vocab_size, stride, *terms, needs_gradient,
                          num_threads);
}

// Entropy of the predicted distribution of each row, in nats.
void compute_entropies_bf16(const bf16* logits, float* entropies, const CrossEntropyTerms* terms, int64_t num_rows,
                            int64_t vocab_size, int64_t stride, int num_threads) {
    compute_entropies(logits, entropies, num_rows, vocab_size, stride, *terms, num_threads);
}

void compute_entropies_fp32(const float* logits, float* entropies, const CrossEntropyTerms* terms, int64_t num_rows,
                            int64_t vocab_size, int64_t stride, int num_threads) {
    compute_entropies(logits, entropies, num_rows, vocab_size, stride, *terms, num_threads);
}
}

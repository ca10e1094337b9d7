// Cross-entropy of tokens on the CPU; gradients are written over the logits. A row is read three times, from the cache.
//
// Vectors of 16 floats, which compilers split to the width of the processor. The order of sums is fixed, so results
// do not depend on the number of threads. Multiply-adds are fused, which saves a third of the time.

#include "logits.h"

namespace {

struct Terms : LogitTransform {
    float smoothing, z_loss;
};

struct Sums {
    double exps = 0, logits = 0;  // sums of exp(x - max) and of x - max
    double spread = 0;            // sum of (x - max) exp(x - max)
};

template <typename T, bool CAP, bool SPREAD = false>
INLINE Sums sums(const T* logits, int64_t vocab, float most, const Terms& terms) {
    Sums total;
    FloatVector slope;
    int64_t i = 0;
    while (i + LANES <= vocab) {
        const int64_t stop = vocab - i < FP32_SUM_SIZE ? vocab / LANES * LANES : i + FP32_SUM_SIZE;
        FloatVector exps = {}, plain = {}, spread = {};
        for (; i < stop; i += LANES) {
            const FloatVector x = apply_softcap<CAP>(load_vector(logits + i) * terms.scale, terms, &slope) - most;
            const FloatVector e = exp(x);
            exps += e;
            plain += x;
            if (SPREAD) spread += e * (x <= MIN_EXP_INPUT ? FloatVector{} : x);  // 0 * -inf is NaN
        }
        for (int k = 0; k < LANES; k++) {
            total.exps += exps[k];
            total.logits += plain[k];
            total.spread += spread[k];
        }
    }
    for (; i < vocab; i++) {
        const FloatVector x = apply_softcap<CAP>(broadcast(load_scalar(logits + i) * terms.scale), terms, &slope) - most;
        const float e = exp(x)[0];
        total.exps += e;
        total.logits += x[0];
        if (SPREAD) total.spread += x[0] <= MIN_EXP_INPUT ? 0.0f : e * x[0];
    }
    return total;
}

// Gradient: weight * slope * (share * p - spread), minus `right` at the target, for probabilities p.
struct Slopes {
    float most, share, spread, right;
};

template <bool CAP>
INLINE FloatVector slopes(FloatVector x, const Slopes& by, const Terms& terms) {
    FloatVector slope;
    x = apply_softcap<CAP>(x * terms.scale, terms, &slope);
    return (exp(x - by.most) * by.share - by.spread) * slope;
}

template <typename T, bool CAP>
INLINE void gradient(T* logits, int64_t target, int64_t vocab, const Slopes& by, const Terms& terms) {
    Slopes there = by;
    there.spread += by.right;
    const float right = slopes<CAP>(broadcast(load_scalar(logits + target)), there, terms)[0];
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) store_vector(slopes<CAP>(load_vector(logits + i), by, terms), logits + i);
    for (; i < vocab; i++) store_scalar(slopes<CAP>(broadcast(load_scalar(logits + i)), by, terms)[0], logits + i);
    store_scalar(right, logits + target);
}

template <typename T, bool CAP>
float row(T* logits, int64_t target, int64_t vocab, float weight, const Terms& terms, bool wanted) {
    FloatVector slope;
    const float most = apply_softcap<CAP>(broadcast(compute_max_scaled_logit(logits, vocab, terms.scale)), terms, &slope)[0];
    const Sums all = sums<T, CAP>(logits, vocab, most, terms);
    const double right = apply_softcap<CAP>(broadcast(load_scalar(logits + target) * terms.scale), terms, &slope)[0] - most;
    const double normal = std::log(all.exps), whole = most + normal;
    const double kept = 1.0 - terms.smoothing, spread = terms.smoothing / double(vocab);
    const double share = (1.0 + 2.0 * terms.z_loss * whole) / all.exps;
    const Slopes by = {most, float(weight * share), float(weight * spread), float(weight * kept)};
    if (wanted) gradient<T, CAP>(logits, target, vocab, by, terms);
    const double smoothed = terms.smoothing > 0 ? spread * all.logits : 0.0;
    return normal - kept * right - smoothed + terms.z_loss * whole * whole;
}

template <typename T, bool CAP>
float entropy(const T* logits, int64_t vocab, const Terms& terms) {
    FloatVector slope;
    const float most = apply_softcap<CAP>(broadcast(compute_max_scaled_logit(logits, vocab, terms.scale)), terms, &slope)[0];
    const Sums all = sums<T, CAP, true>(logits, vocab, most, terms);
    return std::log(all.exps) - all.spread / all.exps;
}

template <typename T>
void entropies(const T* logits, float* out, int64_t rows, int64_t vocab, int64_t stride, const Terms& terms,
               int threads) {
    const auto work = terms.softcap > 0 ? entropy<T, true> : entropy<T, false>;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < rows; r++) out[r] = work(logits + r * stride, vocab, terms);
}

template <typename T>
int64_t losses(T* logits, const int64_t* targets, const float* weights, float* out, int64_t rows, int64_t vocab,
               int64_t stride, const Terms& terms, bool wanted, int threads) {
    const auto work = terms.softcap > 0 ? row<T, true> : row<T, false>;
    int64_t wrong = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : wrong) schedule(dynamic, 4)
    for (int64_t r = 0; r < rows; r++) {
        T* of = logits + r * stride;
        wrong += targets[r] >= vocab;
        if (targets[r] >= 0 && targets[r] < vocab) {
            out[r] = work(of, targets[r], vocab, weights ? weights[r] : 1.0f, terms, wanted);
        } else {
            out[r] = 0;
            if (wanted && vocab) std::memset(of, 0, vocab * sizeof(T));
        }
    }
    return wrong;
}

}  // namespace

extern "C" {

// Returns the number of targets that are not in the vocabulary. `weights` may be null: all weights are 1.
int64_t losses_bf16(bf16* logits, const int64_t* targets, const float* weights, float* out, const Terms* terms,
                    int64_t rows, int64_t vocab, int64_t stride, int wanted, int threads) {
    return losses(logits, targets, weights, out, rows, vocab, stride, *terms, wanted, threads);
}

int64_t losses_fp32(float* logits, const int64_t* targets, const float* weights, float* out, const Terms* terms,
                    int64_t rows, int64_t vocab, int64_t stride, int wanted, int threads) {
    return losses(logits, targets, weights, out, rows, vocab, stride, *terms, wanted, threads);
}

// Entropy of the prediction of each row, in nats.
void entropies_bf16(const bf16* logits, float* out, const Terms* terms, int64_t rows, int64_t vocab, int64_t stride,
                    int threads) {
    entropies(logits, out, rows, vocab, stride, *terms, threads);
}

void entropies_fp32(const float* logits, float* out, const Terms* terms, int64_t rows, int64_t vocab, int64_t stride,
                    int threads) {
    entropies(logits, out, rows, vocab, stride, *terms, threads);
}
}

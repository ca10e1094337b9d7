// KL divergences between two rows of logits; the gradient is written over the first row.
//
// For student p and teacher q: forward KL(q || m) + reverse KL(p || n) with m = s q + (1 - s) p and
// n = t p + (1 - t) q. If s and t are 0, logarithms of single values are not needed.

#include "logits.h"

#include <vector>

namespace {

constexpr float MIN_LOG_PROB = -1e4f;  // avoids NaN from 0 * inf
constexpr float MIN_PROB = 1e-37f;
constexpr int NUM_METRICS = 5;  // divergence, forward KL, entropy of student and teacher, top-1 agreement

// KLTerms.values of kl_divergence.py: `forward` and `reverse` are the weights of both KL divergences.
struct KLTerms {
    LogitTransform student, teacher;
    float temperature, forward, forward_skew, reverse, reverse_skew, weight;
};

struct DivergenceSizes {
    int64_t num_rows, num_ids, vocab_size;  // num_ids: ids that both models embed
    int64_t student_stride, teacher_stride;
};

struct TopKSizes {
    int64_t num_rows, num_ids, vocab_size, stride, top_k;
};

// Natural logarithm of values >= MIN_PROB, with an error of 1e-7.
INLINE FloatVector log(FloatVector x) {
    const Uint32Vector bits = (Uint32Vector)x;
    FloatVector e = __builtin_convertvector((bits >> 23) & 0xff, FloatVector) - 126.0f;
    FloatVector m = (FloatVector)((bits & 0x7fffff) | 0x3f000000);
    const auto is_low = m < 0.707106781f;
    e = is_low ? e - 1.0f : e;
    m = (is_low ? m + m : m) - 1.0f;
    const FloatVector z = m * m;
    FloatVector y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z + e * LN2_LOW - z * 0.5f;
    const FloatVector result = m + y + e * LN2_HIGH;
    return x == x ? result : x;
}

// Up to 16 logits, followed by -inf.
template <typename T>
INLINE FloatVector load_masked(const T* source, int64_t count) {
    if (count >= LANES) return load_vector(source);
    T values[LANES];
    store_vector(broadcast(-INFINITY), values);
    std::memcpy(values, source, count * sizeof(T));
    return load_vector(values);
}

template <typename T>
INLINE void store_masked(FloatVector x, T* out, int64_t count) {
    if (count >= LANES) return store_vector(x, out);
    T values[LANES];
    store_vector(x, values);
    std::memcpy(out, values, count * sizeof(T));
}

// Logits of the student or teacher: scaled, softcapped, divided by the temperature, and shifted by their maximum.
struct ShiftedLogits {
    LogitTransform transform;
    float inverse_temperature, max_scaled_logit, max_logit;  // max_logit: after softcap and temperature

    template <typename T>
    ShiftedLogits(const T* logits, int64_t num_ids, const LogitTransform& transform, float temperature)
        : transform(transform), inverse_temperature(1.0f / temperature) {
        FloatVector unused;
        max_scaled_logit = compute_max_scaled_logit(logits, num_ids, transform.scale);
        max_logit = apply_temperature(broadcast(max_scaled_logit), &unused)[0];
    }

    // Softcapped scaled logits over the temperature, and their derivative with respect to raw logits.
    INLINE FloatVector apply_temperature(FloatVector x, FloatVector* derivative) const {
        x = transform.softcap > 0 ? apply_softcap<true>(x, transform, derivative)
                                  : apply_softcap<false>(x, transform, derivative);
        *derivative *= inverse_temperature;
        return x * inverse_temperature;
    }

    template <typename T>
    INLINE FloatVector load_scaled(const T* source, int64_t count) const {
        return load_masked(source, count) * transform.scale;
    }

    template <typename T>
    INLINE FloatVector load(const T* source, int64_t count, FloatVector* derivative) const {
        FloatVector x = apply_temperature(load_scaled(source, count), derivative) - max_logit;
        x = x < MIN_LOG_PROB ? broadcast(MIN_LOG_PROB) : x;
        for (int64_t k = count; k < LANES; k++) x[k] = MIN_LOG_PROB;
        return x;
    }
};

// Sums over the shifted logits x of the student and y of the teacher.
struct RowSums {
    double exp_x = 0, exp_y = 0;      // of exp(x) and exp(y)
    double x_exp_x = 0, y_exp_y = 0;  // of x exp(x) and y exp(y)
    double forward = 0, reverse = 0;  // of (y - x) exp(y) and (y - x) exp(x)
    double divergence = 0, grad_log_prob = 0;
    bool has_top1_agreement = false;
};

INLINE double sum_lanes(FloatVector x) {
    double sum = 0;
    for (int k = 0; k < LANES; k++) sum += x[k];
    return sum;
}

template <typename T, typename U>
INLINE RowSums sum_row(const T* student, const U* teacher, int64_t num_ids, const ShiftedLogits& a,
                       const ShiftedLogits& b) {
    RowSums sums;
    FloatVector unused;
    for (int64_t i = 0; i < num_ids;) {
        const int64_t stop = num_ids - i < FP32_SUM_SIZE ? num_ids : i + FP32_SUM_SIZE;
        FloatVector exp_x = {}, exp_y = {}, x_exp_x = {}, y_exp_y = {}, forward = {}, reverse = {};
        Uint32Vector has_top1_agreement = {};
        for (; i < stop; i += LANES) {
            const auto x = a.load(student + i, stop - i, &unused), y = b.load(teacher + i, stop - i, &unused);
            const FloatVector ex = exp(x), ey = exp(y);
            exp_x += ex;
            exp_y += ey;
            x_exp_x += ex * x;
            y_exp_y += ey * y;
            forward += ey * (y - x);
            reverse += ex * (y - x);
            has_top1_agreement |= (Uint32Vector)(a.load_scaled(student + i, stop - i) == a.max_scaled_logit) &
                                  (Uint32Vector)(b.load_scaled(teacher + i, stop - i) == b.max_scaled_logit);
        }
        i = stop;
        sums.exp_x += sum_lanes(exp_x);
        sums.exp_y += sum_lanes(exp_y);
        sums.x_exp_x += sum_lanes(x_exp_x);
        sums.y_exp_y += sum_lanes(y_exp_y);
        sums.forward += sum_lanes(forward);
        sums.reverse += sum_lanes(reverse);
        for (int k = 0; k < LANES; k++) sums.has_top1_agreement |= has_top1_agreement[k] != 0;
    }
    return sums;
}

// Summand of an id in the divergence, and its derivative with respect to log p.
struct DivergenceTerms {
    FloatVector divergence, grad_log_prob;
};

template <bool IS_SKEWED>
INLINE DivergenceTerms compute_terms(FloatVector x, FloatVector y, float log_sum_x, float log_sum_y,
                                     const KLTerms& terms) {
    const FloatVector p = exp(x - log_sum_x), q = exp(y - log_sum_y);
    DivergenceTerms result = {};
    if (!IS_SKEWED) {
        result.grad_log_prob = p * (x - log_sum_x - y + log_sum_y) * terms.reverse - q * terms.forward;
        return result;
    }
    const float s = terms.forward_skew, t = terms.reverse_skew;
    if (terms.forward > 0) {
        FloatVector m = q * s + p * (1 - s);
        m = m < MIN_PROB ? broadcast(MIN_PROB) : m;
        result.divergence += q * (y - log_sum_y - (s > 0 ? log(m) : x - log_sum_x)) * terms.forward;
        result.grad_log_prob -= q * (s > 0 ? p / m : broadcast(1.0f)) * ((1 - s) * terms.forward);
    }
    if (terms.reverse > 0) {
        FloatVector n = p * t + q * (1 - t);
        n = n < MIN_PROB ? broadcast(MIN_PROB) : n;
        const FloatVector reverse_kl = p * (x - log_sum_x - (t > 0 ? log(n) : y - log_sum_y));
        result.divergence += reverse_kl * terms.reverse;
        result.grad_log_prob += (reverse_kl - p * (p / n) * t) * terms.reverse;
    }
    return result;
}

// The gradient of logits is that of log-softmax: grad_log_prob - p sum(grad_log_prob).
template <bool IS_SKEWED, typename T, typename U>
void compute_row(T* student, const U* teacher, int64_t num_ids, int64_t vocab_size, const KLTerms& terms,
                 float* metrics, bool needs_gradient) {
    const ShiftedLogits a(student, num_ids, terms.student, terms.temperature);
    const ShiftedLogits b(teacher, num_ids, terms.teacher, terms.temperature);
    RowSums sums = sum_row(student, teacher, num_ids, a, b);
    const double log_sum_x = std::log(sums.exp_x), log_sum_y = std::log(sums.exp_y);
    const double forward_kl = sums.forward / sums.exp_y - log_sum_y + log_sum_x;
    const double reverse_kl = log_sum_y - log_sum_x - sums.reverse / sums.exp_x;
    sums.divergence = terms.forward * forward_kl + terms.reverse * reverse_kl;
    sums.grad_log_prob = terms.reverse * reverse_kl - terms.forward;
    FloatVector derivative, unused;
    if (IS_SKEWED) {
        sums.divergence = sums.grad_log_prob = 0;
        for (int64_t i = 0; i < num_ids;) {
            const int64_t stop = num_ids - i < FP32_SUM_SIZE ? num_ids : i + FP32_SUM_SIZE;
            DivergenceTerms lane_sums = {};
            for (; i < stop; i += LANES) {
                const auto x = a.load(student + i, stop - i, &unused), y = b.load(teacher + i, stop - i, &unused);
                const DivergenceTerms term = compute_terms<IS_SKEWED>(x, y, log_sum_x, log_sum_y, terms);
                lane_sums.divergence += term.divergence;
                lane_sums.grad_log_prob += term.grad_log_prob;
            }
            i = stop;
            sums.divergence += sum_lanes(lane_sums.divergence);
            sums.grad_log_prob += sum_lanes(lane_sums.grad_log_prob);
        }
    }
    const double values[] = {sums.divergence, forward_kl, log_sum_x - sums.x_exp_x / sums.exp_x,
                             log_sum_y - sums.y_exp_y / sums.exp_y, double(sums.has_top1_agreement)};
    for (int k = 0; k < NUM_METRICS; k++) metrics[k] = values[k];
    if (!needs_gradient) return;
    const float grad_sum = sums.grad_log_prob;
    for (int64_t i = 0; i < num_ids; i += LANES) {
        const auto x = a.load(student + i, num_ids - i, &derivative), y = b.load(teacher + i, num_ids - i, &unused);
        const DivergenceTerms term = compute_terms<IS_SKEWED>(x, y, log_sum_x, log_sum_y, terms);
        const FloatVector grad = term.grad_log_prob - exp(x - float(log_sum_x)) * grad_sum;
        store_masked(grad * derivative * terms.weight, student + i, num_ids - i);
    }
    std::memset(student + num_ids, 0, (vocab_size - num_ids) * sizeof(T));
}

template <typename T, typename U>
void compute_divergences(T* student, const U* teacher, const KLTerms& terms, float* metrics,
                         const DivergenceSizes* sizes, bool needs_gradient, int num_threads) {
    const int64_t num_rows = sizes->num_rows, num_ids = sizes->num_ids, vocab_size = sizes->vocab_size;
    const bool is_skewed = terms.forward_skew > 0 || terms.reverse_skew > 0;
    const auto kernel = is_skewed ? compute_row<true, T, U> : compute_row<false, T, U>;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < num_rows; r++)
        kernel(student + r * sizes->student_stride, teacher + r * sizes->teacher_stride, num_ids, vocab_size, terms,
               metrics + NUM_METRICS * r, needs_gradient);
}

inline double clamp_log_prob(double x) { return x < MIN_LOG_PROB ? MIN_LOG_PROB : x; }
inline double clamp_prob(double x) { return x < MIN_PROB ? MIN_PROB : x; }

// Log-probabilities of the top-k ids, and of all other ids as one. The constructor replaces the logits of the top-k ids
// by -inf; `restore_logits` writes them back.
template <typename T>
struct TopKLogProbs {
    int64_t num_ids, top_k;
    const int32_t* ids;
    ShiftedLogits full, rest;  // maximum over all ids, and over the other ids
    std::vector<T> top_logits;
    std::vector<double> log_probs;     // of the top-k ids; the last one is that of all other ids
    double entropy, rest_exp_sum = 0;  // entropy over all ids; sum of exp(x - max) over the other ids

    TopKLogProbs(T* row, int64_t num_ids, const int32_t* ids, int64_t top_k, const LogitTransform& transform,
                 float temperature)
        : num_ids(num_ids), top_k(top_k), ids(ids), full(row, num_ids, transform, temperature), rest(full),
          top_logits(top_k), log_probs(top_k + 1) {
        FloatVector unused;
        double exp_sum = 0, x_exp_sum = 0;
        for (int64_t j = 0; j < top_k; j++) {
            top_logits[j] = row[ids[j]];
            const float scaled = load_scalar(&top_logits[j]) * transform.scale;
            log_probs[j] = full.apply_temperature(broadcast(scaled), &unused)[0] - full.max_logit;
            const double x = clamp_log_prob(log_probs[j]);
            exp_sum += std::exp(x);
            x_exp_sum += x * std::exp(x);
            store_scalar(-INFINITY, row + ids[j]);
        }
        rest = ShiftedLogits(row, num_ids, transform, temperature);
        log_probs[top_k] = -INFINITY;
        if (rest.max_logit != -INFINITY) {
            const double max_difference = rest.max_logit - full.max_logit, rest_x_exp_sum = sum_rest(row);
            log_probs[top_k] = max_difference + std::log(rest_exp_sum);
            exp_sum += std::exp(max_difference) * rest_exp_sum;
            x_exp_sum += std::exp(max_difference) * (rest_x_exp_sum + max_difference * rest_exp_sum);
        }
        for (double& x : log_probs) x -= std::log(exp_sum);
        entropy = std::log(exp_sum) - x_exp_sum / exp_sum;
    }

    // Add exp(x - max) of the other ids to `rest_exp_sum`; return the sum of (x - max) exp(x - max).
    double sum_rest(const T* row) {
        double x_exp_sum = 0;
        FloatVector unused;
        for (int64_t i = 0; i < num_ids;) {
            const int64_t stop = num_ids - i < FP32_SUM_SIZE ? num_ids : i + FP32_SUM_SIZE;
            FloatVector exp_sums = {}, x_exp_sums = {};
            for (; i < stop; i += LANES) {
                const FloatVector x = rest.load(row + i, stop - i, &unused), e = exp(x);
                exp_sums += e;
                x_exp_sums += e * x;
            }
            i = stop;
            rest_exp_sum += sum_lanes(exp_sums);
            x_exp_sum += sum_lanes(x_exp_sums);
        }
        return x_exp_sum;
    }

    // In reverse order, so that the logit of a repeated id is restored.
    void restore_logits(T* row) const {
        for (int64_t j = top_k; j-- > 0;) row[ids[j]] = top_logits[j];
    }
};

// As DivergenceTerms, for log-probabilities in double; also forward KL and q log q.
struct TopKTerms {
    double divergence, grad_log_prob, forward_kl, q_log_q;
};

inline TopKTerms compute_top_k_terms(double lp, double lq, const KLTerms& terms) {
    const double p = std::exp(lp), q = std::exp(lq), s = terms.forward_skew, t = terms.reverse_skew;
    TopKTerms result = {0, 0, q * (lq - lp), q * lq};
    if (terms.forward > 0) {
        const double m = clamp_prob(s * q + (1 - s) * p);
        result.divergence += terms.forward * q * (lq - (s > 0 ? std::log(m) : lp));
        result.grad_log_prob -= terms.forward * (1 - s) * q * (s > 0 ? p / m : 1);
    }
    if (terms.reverse > 0) {
        const double n = clamp_prob(t * p + (1 - t) * q), reverse_kl = p * (lp - (t > 0 ? std::log(n) : lq));
        result.divergence += terms.reverse * reverse_kl;
        result.grad_log_prob += terms.reverse * (reverse_kl - t * p * (p / n));
    }
    return result;
}

template <typename T>
void compute_top_k_row(T* student, const int32_t* ids, const float* teacher_log_probs, const TopKSizes* sizes,
                       const KLTerms& terms, float* metrics, bool needs_gradient) {
    const int64_t num_ids = sizes->num_ids, vocab_size = sizes->vocab_size, top_k = sizes->top_k;
    TopKLogProbs<T> top(student, num_ids, ids, top_k, terms.student, terms.temperature);
    TopKTerms sums = {};
    std::vector<double> grads(top_k + 1);
    for (int64_t j = 0; j <= top_k; j++) {
        const TopKTerms term =
            compute_top_k_terms(clamp_log_prob(top.log_probs[j]), clamp_log_prob(teacher_log_probs[j]), terms);
        sums = {sums.divergence + term.divergence, sums.grad_log_prob + term.grad_log_prob,
                sums.forward_kl + term.forward_kl, sums.q_log_q + term.q_log_q};
        grads[j] = term.grad_log_prob;
    }
    const bool has_top1_agreement = load_scalar(&top.top_logits[0]) * terms.student.scale == top.full.max_scaled_logit;
    const double values[] = {sums.divergence, sums.forward_kl, top.entropy, -sums.q_log_q, double(has_top1_agreement)};
    for (int k = 0; k < NUM_METRICS; k++) metrics[k] = values[k];
    if (!needs_gradient) return top.restore_logits(student);
    const float derivative = terms.weight * terms.student.scale / terms.temperature;
    for (int64_t j = 0; j <= top_k; j++)
        grads[j] = derivative * (grads[j] - std::exp(clamp_log_prob(top.log_probs[j])) * sums.grad_log_prob);
    const float rest_factor = top.rest_exp_sum != 0 ? grads[top_k] / top.rest_exp_sum : 0;
    FloatVector unused;
    for (int64_t i = 0; i < num_ids; i += LANES) {
        const FloatVector x = top.rest.load(student + i, num_ids - i, &unused);
        store_masked(rest_factor != 0 ? exp(x) * rest_factor : FloatVector{}, student + i, num_ids - i);
    }
    for (int64_t j = 0; j < top_k; j++) store_scalar(float(grads[j]), student + ids[j]);
    std::memset(student + num_ids, 0, (vocab_size - num_ids) * sizeof(T));
}

template <typename T>
void compute_top_k_divergences(T* student, const int32_t* ids, const float* teacher_log_probs, const KLTerms& terms,
                               float* metrics, const TopKSizes* sizes, bool needs_gradient, int num_threads) {
    const int64_t num_rows = sizes->num_rows, top_k = sizes->top_k;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < num_rows; r++)
        compute_top_k_row(student + r * sizes->stride, ids + r * top_k, teacher_log_probs + r * (top_k + 1), sizes,
                          terms, metrics + NUM_METRICS * r, needs_gradient);
}

template <typename T>
void compute_top_k_log_probs(T* logits, const int32_t* ids, float* log_probs, const KLTerms& terms,
                             const TopKSizes* sizes, int num_threads) {
    const int64_t num_rows = sizes->num_rows, top_k = sizes->top_k;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < num_rows; r++) {
        T* row = logits + r * sizes->stride;
        const TopKLogProbs<T> top(row, sizes->num_ids, ids + r * top_k, top_k, terms.teacher, terms.temperature);
        top.restore_logits(row);
        for (int64_t j = 0; j <= top_k; j++) log_probs[r * (top_k + 1) + j] = top.log_probs[j];
    }
}

}  // namespace

#define DEFINE_DIVERGENCES(NAME, T, U)                                                                              \
    extern "C" void compute_divergences_##NAME(T* student, const U* teacher, const KLTerms* terms, float* metrics,  \
                                               const DivergenceSizes* sizes, int needs_gradient, int num_threads) { \
        compute_divergences(student, teacher, *terms, metrics, sizes, needs_gradient, num_threads);                 \
    }

DEFINE_DIVERGENCES(fp32_fp32, float, float)
DEFINE_DIVERGENCES(fp32_bf16, float, bf16)
DEFINE_DIVERGENCES(bf16_fp32, bf16, float)
DEFINE_DIVERGENCES(bf16_bf16, bf16, bf16)

// Without softcap.
#define DEFINE_TOP_K(NAME, T)                                                                                        \
    extern "C" void compute_top_k_divergences_##NAME(T* student, const int32_t* ids, const float* teacher_log_probs, \
                                                     const KLTerms* terms, float* metrics, const TopKSizes* sizes,   \
                                                     int needs_gradient, int num_threads) {                          \
        compute_top_k_divergences(student, ids, teacher_log_probs, *terms, metrics, sizes, needs_gradient,           \
                                  num_threads);                                                                      \
    }                                                                                                                \
    extern "C" void compute_top_k_log_probs_##NAME(T* logits, const int32_t* ids, float* log_probs,                  \
                                                   const KLTerms* terms, const TopKSizes* sizes, int num_threads) {  \
        compute_top_k_log_probs(logits, ids, log_probs, *terms, sizes, num_threads);                                 \
    }

DEFINE_TOP_K(fp32, float)
DEFINE_TOP_K(bf16, bf16)

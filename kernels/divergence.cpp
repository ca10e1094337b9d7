// KL divergences between two rows of logits; the gradient is written over the first row.
//
// For student p and teacher q: forward KL(q || m) + reverse KL(p || n) with m = s q + (1 - s) p and
// n = t p + (1 - t) q. If s and t are 0, logarithms of single values are not needed.

#include "logits.h"

#include <vector>

namespace {

constexpr float FLOOR = -1e4f;  // lower bound of log-probabilities, which avoids NaN from 0 * inf
constexpr float TINY = 1e-37f;

struct Terms {
    LogitTransform student, teacher;
    float temperature, forward, forward_skew, reverse, reverse_skew, weight;
};

// Natural logarithm of values >= TINY, with an error of 1e-7.
INLINE FloatVector log(FloatVector x) {
    const Uint32Vector bits = (Uint32Vector)x;
    FloatVector e = __builtin_convertvector((bits >> 23) & 0xff, FloatVector) - 126.0f;
    FloatVector m = (FloatVector)((bits & 0x7fffff) | 0x3f000000);
    const auto low = m < 0.707106781f;
    e = low ? e - 1.0f : e;
    m = (low ? m + m : m) - 1.0f;
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
    const FloatVector found = m + y + e * LN2_HIGH;
    return x == x ? found : x;
}

// Sixteen logits; -inf beyond the last one.
template <typename T>
INLINE FloatVector some(const T* from, int64_t left) {
    if (left >= LANES) return load_vector(from);
    T many[LANES];
    store_vector(broadcast(-INFINITY), many);
    std::memcpy(many, from, left * sizeof(T));
    return load_vector(many);
}

template <typename T>
INLINE void put(FloatVector x, T* to, int64_t left) {
    if (left >= LANES) return store_vector(x, to);
    T many[LANES];
    store_vector(x, many);
    std::memcpy(to, many, left * sizeof(T));
}

// Student or teacher: scaled and softcapped logits over the temperature, minus their maximum.
struct Side {
    LogitTransform cap;
    float slope, top, most;  // maximum logit: raw, scaled, and after softcap and temperature

    template <typename T>
    Side(const T* logits, int64_t count, const LogitTransform& by, float temperature) : cap(by), slope(1.0f / temperature) {
        FloatVector unused;
        top = compute_max_scaled_logit(logits, count, by.scale);
        most = finished(broadcast(top), &unused)[0];
    }

    INLINE FloatVector finished(FloatVector x, FloatVector* by) const {
        x = cap.softcap > 0 ? apply_softcap<true>(x, cap, by) : apply_softcap<false>(x, cap, by);
        *by *= slope;
        return x * slope;
    }

    template <typename T>
    INLINE FloatVector scaled(const T* from, int64_t left) const {
        return some(from, left) * cap.scale;
    }

    template <typename T>
    INLINE FloatVector at(const T* from, int64_t left, FloatVector* by) const {
        FloatVector x = finished(scaled(from, left), by) - most;
        x = x < FLOOR ? broadcast(FLOOR) : x;
        for (int64_t k = left; k < LANES; k++) x[k] = FLOOR;
        return x;
    }
};

struct Sums {
    double p = 0, q = 0;            // sums of exponentials
    double own = 0, other = 0;      // sums of logits times their exponentials
    double ahead = 0, behind = 0;   // sums of teacher logit minus student logit, times q and times p
    double far = 0, pull = 0;       // sums of the divergence, and of its derivatives times p
    bool agree = false;
};

INLINE double total(FloatVector x) {
    double sum = 0;
    for (int k = 0; k < LANES; k++) sum += x[k];
    return sum;
}

template <typename T, typename U>
INLINE Sums sums(const T* student, const U* teacher, int64_t count, const Side& a, const Side& b) {
    Sums all;
    FloatVector unused;
    for (int64_t i = 0; i < count;) {
        const int64_t stop = count - i < FP32_SUM_SIZE ? count : i + FP32_SUM_SIZE;
        FloatVector p = {}, q = {}, own = {}, other = {}, ahead = {}, behind = {};
        Uint32Vector both = {};
        for (; i < stop; i += LANES) {
            const FloatVector x = a.at(student + i, stop - i, &unused), y = b.at(teacher + i, stop - i, &unused);
            const FloatVector ex = exp(x), ey = exp(y);
            p += ex;
            q += ey;
            own += ex * x;
            other += ey * y;
            ahead += ey * (y - x);
            behind += ex * (y - x);
            both |= (Uint32Vector)(a.scaled(student + i, stop - i) == a.top) & (Uint32Vector)(b.scaled(teacher + i, stop - i) == b.top);
        }
        i = stop;
        all.p += total(p);
        all.q += total(q);
        all.own += total(own);
        all.other += total(other);
        all.ahead += total(ahead);
        all.behind += total(behind);
        for (int k = 0; k < LANES; k++) all.agree |= both[k] != 0;
    }
    return all;
}

// Summand of an id in the divergence, and its derivative with respect to p, times p.
struct Piece {
    FloatVector far, pull;
};

template <bool MIXED>
INLINE Piece piece(FloatVector x, FloatVector y, float own, float other, const Terms& terms) {
    const FloatVector p = exp(x - own), q = exp(y - other);
    Piece found = {};
    if (!MIXED) {
        found.pull = p * (x - own - y + other) * terms.reverse - q * terms.forward;
        return found;
    }
    const float s = terms.forward_skew, t = terms.reverse_skew;
    if (terms.forward > 0) {
        FloatVector m = q * s + p * (1 - s);
        m = m < TINY ? broadcast(TINY) : m;
        found.far += q * (y - other - (s > 0 ? log(m) : x - own)) * terms.forward;
        found.pull -= q * (s > 0 ? p / m : broadcast(1.0f)) * ((1 - s) * terms.forward);
    }
    if (terms.reverse > 0) {
        FloatVector n = p * t + q * (1 - t);
        n = n < TINY ? broadcast(TINY) : n;
        const FloatVector far = p * (x - own - (t > 0 ? log(n) : y - other));
        found.far += far * terms.reverse;
        found.pull += (far - p * (p / n) * t) * terms.reverse;
    }
    return found;
}

template <bool MIXED, typename T, typename U>
void row(T* student, const U* teacher, int64_t count, int64_t vocab, const Terms& terms, float* out, bool wanted) {
    const Side a(student, count, terms.student, terms.temperature), b(teacher, count, terms.teacher, terms.temperature);
    Sums all = sums(student, teacher, count, a, b);
    const double own = std::log(all.p), other = std::log(all.q);
    const double forward = all.ahead / all.q - other + own, reverse = other - own - all.behind / all.p;
    all.far = terms.forward * forward + terms.reverse * reverse;
    all.pull = terms.reverse * reverse - terms.forward;
    FloatVector slope, unused;
    if (MIXED) {
        all.far = all.pull = 0;
        for (int64_t i = 0; i < count;) {
            const int64_t stop = count - i < FP32_SUM_SIZE ? count : i + FP32_SUM_SIZE;
            Piece sum = {};
            for (; i < stop; i += LANES) {
                const FloatVector x = a.at(student + i, stop - i, &unused), y = b.at(teacher + i, stop - i, &unused);
                const Piece one = piece<MIXED>(x, y, own, other, terms);
                sum.far += one.far;
                sum.pull += one.pull;
            }
            i = stop;
            all.far += total(sum.far);
            all.pull += total(sum.pull);
        }
    }
    const double found[] = {all.far, forward, own - all.own / all.p, other - all.other / all.q, double(all.agree)};
    for (int k = 0; k < 5; k++) out[k] = found[k];
    if (!wanted) return;
    const float pull = all.pull;
    for (int64_t i = 0; i < count; i += LANES) {
        const FloatVector x = a.at(student + i, count - i, &slope), y = b.at(teacher + i, count - i, &unused);
        const Piece one = piece<MIXED>(x, y, own, other, terms);
        put((one.pull - exp(x - float(own)) * pull) * slope * terms.weight, student + i, count - i);
    }
    std::memset(student + count, 0, (vocab - count) * sizeof(T));
}

template <typename T, typename U>
void divergences(T* student, const U* teacher, const Terms& terms, float* out, const int64_t* sizes, bool wanted,
                 int threads) {
    const int64_t rows = sizes[0], count = sizes[1], vocab = sizes[2];
    const auto work = terms.forward_skew > 0 || terms.reverse_skew > 0 ? row<true, T, U> : row<false, T, U>;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < rows; r++)
        work(student + r * sizes[3], teacher + r * sizes[4], count, vocab, terms, out + 5 * r, wanted);
}

inline double floored(double x) { return x < FLOOR ? FLOOR : x; }
inline double least(double x) { return x < TINY ? TINY : x; }

// Divergence over some ids, with all other ids as one. The logits of these ids are moved out of the row meanwhile.
template <typename T>
struct Few {
    int64_t count, some;
    const int32_t* ids;
    Side all, rest;              // maximum over all ids, and over the other ids
    std::vector<T> away;
    std::vector<double> logs;    // log-probabilities of the ids; the last one is that of all other ids
    double entropy, others = 0;  // entropy over all ids; sum of exp(x - max) over the other ids

    Few(T* row, int64_t count, const int32_t* ids, int64_t some, const LogitTransform& cap, float temperature)
        : count(count), some(some), ids(ids), all(row, count, cap, temperature), rest(all), away(some), logs(some + 1) {
        FloatVector unused;
        double p = 0, own = 0;
        for (int64_t j = 0; j < some; j++) {
            away[j] = row[ids[j]];
            logs[j] = all.finished(broadcast(load_scalar(&away[j]) * cap.scale), &unused)[0] - all.most;
            const double x = floored(logs[j]);
            p += std::exp(x);
            own += x * std::exp(x);
            store_scalar(-INFINITY, row + ids[j]);
        }
        rest = Side(row, count, cap, temperature);
        logs[some] = -INFINITY;
        if (rest.most != -INFINITY) {
            const double left = rest.most - all.most, below = sum(row);
            logs[some] = left + std::log(others);
            p += std::exp(left) * others;
            own += std::exp(left) * (below + left * others);
        }
        for (double& x : logs) x -= std::log(p);
        entropy = std::log(p) - own / p;
    }

    // Sums of exp(x - max) and of (x - max) exp(x - max) over the other ids.
    double sum(const T* row) {
        double own = 0;
        FloatVector unused;
        for (int64_t i = 0; i < count;) {
            const int64_t stop = count - i < FP32_SUM_SIZE ? count : i + FP32_SUM_SIZE;
            FloatVector p = {}, times = {};
            for (; i < stop; i += LANES) {
                const FloatVector x = rest.at(row + i, stop - i, &unused), e = exp(x);
                p += e;
                times += e * x;
            }
            i = stop;
            others += total(p);
            own += total(times);
        }
        return own;
    }

    // In reverse order, so that a repeated id gets its logit back.
    void back(T* row) const {
        for (int64_t j = some; j-- > 0;) row[ids[j]] = away[j];
    }
};

// As `piece`, for log-probabilities in double; also forward KL and q log q.
struct Both {
    double far, pull, forward, own;
};

inline Both both(double lp, double lq, const Terms& terms) {
    const double p = std::exp(lp), q = std::exp(lq), s = terms.forward_skew, t = terms.reverse_skew;
    Both found = {0, 0, q * (lq - lp), q * lq};
    if (terms.forward > 0) {
        const double m = least(s * q + (1 - s) * p);
        found.far += terms.forward * q * (lq - (s > 0 ? std::log(m) : lp));
        found.pull -= terms.forward * (1 - s) * q * (s > 0 ? p / m : 1);
    }
    if (terms.reverse > 0) {
        const double n = least(t * p + (1 - t) * q), far = p * (lp - (t > 0 ? std::log(n) : lq));
        found.far += terms.reverse * far;
        found.pull += terms.reverse * (far - t * p * (p / n));
    }
    return found;
}

template <typename T>
void top_row(T* student, const int32_t* ids, const float* logs, const int64_t* sizes, const Terms& terms, float* out,
             bool wanted) {
    const int64_t count = sizes[1], vocab = sizes[2], some = sizes[4];
    Few<T> own(student, count, ids, some, terms.student, terms.temperature);
    Both sum = {};
    std::vector<double> pulls(some + 1);
    for (int64_t j = 0; j <= some; j++) {
        const Both one = both(floored(own.logs[j]), floored(logs[j]), terms);
        sum = {sum.far + one.far, sum.pull + one.pull, sum.forward + one.forward, sum.own + one.own};
        pulls[j] = one.pull;
    }
    const bool agree = load_scalar(&own.away[0]) * terms.student.scale == own.all.top;
    const double found[] = {sum.far, sum.forward, own.entropy, -sum.own, double(agree)};
    for (int k = 0; k < 5; k++) out[k] = found[k];
    if (!wanted) return own.back(student);
    const float slope = terms.weight * terms.student.scale / terms.temperature;
    for (int64_t j = 0; j <= some; j++) pulls[j] = slope * (pulls[j] - std::exp(floored(own.logs[j])) * sum.pull);
    const float each = own.others != 0 ? pulls[some] / own.others : 0;
    FloatVector unused;
    for (int64_t i = 0; i < count; i += LANES) {
        const FloatVector x = own.rest.at(student + i, count - i, &unused);
        put(each != 0 ? exp(x) * each : FloatVector{}, student + i, count - i);
    }
    for (int64_t j = 0; j < some; j++) store_scalar(float(pulls[j]), student + ids[j]);
    std::memset(student + count, 0, (vocab - count) * sizeof(T));
}

template <typename T>
void tops(T* student, const int32_t* ids, const float* logs, const Terms& terms, float* out, const int64_t* sizes,
          bool wanted, int threads) {
    const int64_t rows = sizes[0], some = sizes[4];
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < rows; r++)
        top_row(student + r * sizes[3], ids + r * some, logs + r * (some + 1), sizes, terms, out + 5 * r, wanted);
}

template <typename T>
void expected(T* logits, const int32_t* ids, float* logs, const Terms& terms, const int64_t* sizes, int threads) {
    const int64_t rows = sizes[0], some = sizes[4];
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t r = 0; r < rows; r++) {
        T* row = logits + r * sizes[3];
        const Few<T> few(row, sizes[1], ids + r * some, some, terms.teacher, terms.temperature);
        few.back(row);
        for (int64_t j = 0; j <= some; j++) logs[r * (some + 1) + j] = few.logs[j];
    }
}

}  // namespace

// Sizes: rows, common ids, ids of the student, row strides of student and teacher.
#define MADE(NAME, T, U)                                                                                        \
    extern "C" void NAME(T* student, const U* teacher, const Terms* terms, float* out, const int64_t* sizes,    \
                         int wanted, int threads) {                                                             \
        divergences(student, teacher, *terms, out, sizes, wanted, threads);                                     \
    }

MADE(fp32_fp32, float, float)
MADE(fp32_bf16, float, bf16)
MADE(bf16_fp32, bf16, float)
MADE(bf16_bf16, bf16, bf16)

// Sizes: rows, common ids, local ids, row stride, and number of top-k ids per row. Without softcap.
#define MADE_TOP(NAME, T)                                                                                          \
    extern "C" void top_##NAME(T* student, const int32_t* ids, const float* logs, const Terms* terms, float* out,   \
                               const int64_t* sizes, int wanted, int threads) {                                    \
        tops(student, ids, logs, *terms, out, sizes, wanted, threads);                                             \
    }                                                                                                              \
    extern "C" void expected_##NAME(T* logits, const int32_t* ids, float* logs, const Terms* terms,                 \
                                    const int64_t* sizes, int threads) {                                           \
        expected(logits, ids, logs, *terms, sizes, threads);                                                       \
    }

MADE_TOP(fp32, float)
MADE_TOP(bf16, bf16)

// Losses of tokens on the CPU, and their gradients in place of the logits: a row is read three times, in the cache.
//
// One source for every processor: vectors of sixteen floats, which compilers cut to what the processor has. Sums have
// one order, so that the number of threads changes no bit. No reference is met bit by bit, so products and sums may be
// fused here: that saves a third of the time.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 256 * LANES;  // numbers that are summed in fp32; their sums are added in double
constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
constexpr float LEAST = -87.0f;       // below, exp is no normal number; zero stands for it

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

using bf16 = uint16_t;

struct Terms {
    float scale, softcap, smoothing, z_loss;  // softcap 0: none
};

INLINE Floats same(float x) { return x - Floats{}; }

INLINE Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

INLINE Floats load(const bf16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}

INLINE void store(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }

INLINE void store(Floats x, bf16* to) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves top = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &top, sizeof top);
}

template <typename T>
INLINE float one(const T* from) {
    T many[LANES] = {*from};
    return load(many)[0];
}

template <typename T>
INLINE void put(float x, T* to) {
    T many[LANES];
    store(same(x), many);
    *to = many[0];
}

// 2^n exp(r) with |r| <= ln 2 / 2; the polynomial is off by 4e-9. For x <= 88.
INLINE Floats exp(Floats x) {
    const Floats shifted = x * LOG2E + ROUND;
    const Floats n = shifted - ROUND;
    const Floats r = x - n * LN2_HIGH - n * LN2_LOW;
    Floats p = r * 0.001381459878757596f + 0.0083687175065279f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    p = p * (r * r) + r + 1.0f;
    const Floats found = (Floats)((Words)p + ((Words)shifted << 23));
    return x > LEAST ? found : (x <= LEAST ? Floats{} : x);  // what is no number stays so
}

// A polynomial, off by 9e-9, where the other formula would cancel.
INLINE Floats tanh(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats z = x * x;
    Floats p = z * -0.00570498313754797f + 0.0206390842795372f;
    p = p * z + -0.05373971536755562f;
    p = p * z + 0.13331441581249237f;
    p = p * z + -0.3333328068256378f;
    const Floats near = x + x * z * p;
    const Floats far = 1.0f - 2.0f / (exp((size < 10.0f ? size : same(10.0f)) * 2.0f) + 1.0f);
    const Floats found = size < 0.625f ? near : (x < 0.0f ? -far : far);
    return x == x ? found : x;
}

// The logit that counts, of one that is scaled already, and its slope over what the product gave.
template <bool CAP>
INLINE Floats capped(Floats x, const Terms& terms, Floats* slope) {
    *slope = same(terms.scale);
    if (!CAP) return x;
    x = tanh(x / terms.softcap);
    *slope *= 1.0f - x * x;
    return x * terms.softcap;
}

template <typename T>
INLINE float largest(const T* logits, int64_t vocab, float scale) {
    Floats most = same(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        const Floats x = load(logits + i) * scale;
        most = most > x ? most : x;
    }
    for (; i < vocab; i++) {
        const Floats x = same(one(logits + i) * scale);
        most = most > x ? most : x;
    }
    float found = most[0];
    for (int k = 1; k < LANES; k++) found = found > most[k] ? found : most[k];
    return found;
}

struct Sums {
    double exps = 0, logits = 0;  // both of logits less the largest
    double spread = 0;            // of these, each times its exponential
};

template <typename T, bool CAP, bool SPREAD = false>
INLINE Sums sums(const T* logits, int64_t vocab, float most, const Terms& terms) {
    Sums total;
    Floats slope;
    int64_t i = 0;
    while (i + LANES <= vocab) {
        const int64_t stop = vocab - i < BLOCK ? vocab / LANES * LANES : i + BLOCK;
        Floats exps = {}, plain = {}, spread = {};
        for (; i < stop; i += LANES) {
            const Floats x = capped<CAP>(load(logits + i) * terms.scale, terms, &slope) - most;
            const Floats e = exp(x);
            exps += e;
            plain += x;
            if (SPREAD) spread += e * (x <= LEAST ? Floats{} : x);  // 0 times -inf is no number
        }
        for (int k = 0; k < LANES; k++) {
            total.exps += exps[k];
            total.logits += plain[k];
            total.spread += spread[k];
        }
    }
    for (; i < vocab; i++) {
        const Floats x = capped<CAP>(same(one(logits + i) * terms.scale), terms, &slope) - most;
        const float e = exp(x)[0];
        total.exps += e;
        total.logits += x[0];
        if (SPREAD) total.spread += x[0] <= LEAST ? 0.0f : e * x[0];
    }
    return total;
}

// weight * slope * (share * p - spread), and at the target less `right`, where p sums up to 1.
struct Slopes {
    float most, share, spread, right;
};

template <bool CAP>
INLINE Floats slopes(Floats x, const Slopes& by, const Terms& terms) {
    Floats slope;
    x = capped<CAP>(x * terms.scale, terms, &slope);
    return (exp(x - by.most) * by.share - by.spread) * slope;
}

template <typename T, bool CAP>
INLINE void gradient(T* logits, int64_t target, int64_t vocab, const Slopes& by, const Terms& terms) {
    Slopes there = by;
    there.spread += by.right;
    const float right = slopes<CAP>(same(one(logits + target)), there, terms)[0];
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) store(slopes<CAP>(load(logits + i), by, terms), logits + i);
    for (; i < vocab; i++) put(slopes<CAP>(same(one(logits + i)), by, terms)[0], logits + i);
    put(right, logits + target);
}

template <typename T, bool CAP>
float row(T* logits, int64_t target, int64_t vocab, float weight, const Terms& terms, bool wanted) {
    Floats slope;
    const float most = capped<CAP>(same(largest(logits, vocab, terms.scale)), terms, &slope)[0];
    const Sums all = sums<T, CAP>(logits, vocab, most, terms);
    const double right = capped<CAP>(same(one(logits + target) * terms.scale), terms, &slope)[0] - most;
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
    Floats slope;
    const float most = capped<CAP>(same(largest(logits, vocab, terms.scale)), terms, &slope)[0];
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
            if (wanted) std::memset(of, 0, vocab * sizeof(T));
        }
    }
    return wrong;
}

}  // namespace

extern "C" {

// How many targets the vocabulary does not have. `weights` may be null: each token counts once.
int64_t losses_bf16(bf16* logits, const int64_t* targets, const float* weights, float* out, const Terms* terms,
                    int64_t rows, int64_t vocab, int64_t stride, int wanted, int threads) {
    return losses(logits, targets, weights, out, rows, vocab, stride, *terms, wanted, threads);
}

int64_t losses_fp32(float* logits, const int64_t* targets, const float* weights, float* out, const Terms* terms,
                    int64_t rows, int64_t vocab, int64_t stride, int wanted, int threads) {
    return losses(logits, targets, weights, out, rows, vocab, stride, *terms, wanted, threads);
}

// Of what follows on each row, in nats.
void entropies_bf16(const bf16* logits, float* out, const Terms* terms, int64_t rows, int64_t vocab, int64_t stride,
                    int threads) {
    entropies(logits, out, rows, vocab, stride, *terms, threads);
}

void entropies_fp32(const float* logits, float* out, const Terms* terms, int64_t rows, int64_t vocab, int64_t stride,
                    int threads) {
    entropies(logits, out, rows, vocab, stride, *terms, threads);
}
}

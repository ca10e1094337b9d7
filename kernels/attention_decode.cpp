// Attention of one new token per row on a KV cache, on the CPU. A unit of work is a row and a key head, for all query
// heads that share the key head, so that keys and values are read from memory once.

#include <cmath>
#include <cstdint>

extern "C" struct Args {
    const void *q, *k, *v;  // (B, H, D), (B, slots, H_kv, D), (B, slots, H_kv, V), last dimension contiguous
    const float* sinks;     // (H,) or null
    void* y;                // (B, H, V), contiguous
    const int64_t* spans;   // (B, 2): first visible slot of each row, and the slot after the last
    int64_t rows, heads, kv_heads, dim, v_dim;
    int64_t q_row, q_head, k_row, k_slot, k_head, v_row, v_slot, v_head;  // strides
    float scale, softcap;  // softcap 0: none
    int32_t threads;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "attention_tiles.h"

namespace {

constexpr int64_t MAX_HEADS = 4;               // query heads whose products are in registers at the same time
constexpr int64_t PREFETCH_SLOTS = 16;         // slots between a key and the one that is prefetched
constexpr int64_t MIN_PARALLEL_OPS = 1 << 18;  // multiplications from which several threads are used

inline __m512 load_fp32(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline __m512 load_fp32(const bf16* x, __mmask16 mask) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

// Sums of the elements of 16 registers, in their order.
inline __m512 reduce_add_each(const __m512* x) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d even = _mm512_castps_pd(a[2 * i]), odd = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

// Dot products of N queries (N, dim) with `count` keys: scores (N, stride), for up to 16 keys more than there are.
template <typename T, int N>
void multiply_keys(const float* q, const T* k, int64_t slot, int64_t count, int64_t dim, float* scores,
                   int64_t stride) {
    constexpr int KEY_TILE = N == 1 ? 16 : N == 2 ? 8 : 4;
    for (int64_t j = 0; j < count; j += KEY_TILE) {
        const int64_t last = count - 1 - j;
        __m512 sums[LANES];
        for (auto& sum : sums) sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < dim; i += LANES) {
            const __mmask16 mask = tail_mask(dim - i);
            __m512 queries[N];
            for (int n = 0; n < N; n++) queries[n] = load_fp32(q + n * dim + i, mask);
            for (int64_t m = 0; m < KEY_TILE; m++) {
                const T* address = k + (j + std::min(m, last)) * slot + i;
                _mm_prefetch(reinterpret_cast<const char*>(address + PREFETCH_SLOTS * slot), _MM_HINT_T0);
                const __m512 key = load_fp32(address, mask);
                for (int n = 0; n < N; n++)
                    sums[n * KEY_TILE + m] = _mm512_fmadd_ps(queries[n], key, sums[n * KEY_TILE + m]);
            }
        }
        alignas(64) float products[LANES];
        _mm512_store_ps(products, reduce_add_each(sums));
        for (int n = 0; n < N; n++)
            std::memcpy(scores + n * stride + j, products + n * KEY_TILE, KEY_TILE * sizeof(float));
    }
}

// Sums of `count` values, weighted by probabilities (N, stride): y (N, v_dim), times `factors`.
template <typename T, int N>
void sum_values(const float* probabilities, int64_t stride, const T* v, int64_t slot, int64_t count, int64_t v_dim,
                const float* factors, T* y) {
    constexpr int NUM_ACCUMULATORS = N == 1 ? 8 : N == 2 ? 4 : 2;  // an addition takes several cycles
    for (int64_t i = 0; i < v_dim; i += LANES) {
        const __mmask16 mask = tail_mask(v_dim - i);
        __m512 sums[N][NUM_ACCUMULATORS];
        for (int n = 0; n < N; n++)
            for (auto& sum : sums[n]) sum = _mm512_setzero_ps();
        int64_t j = 0;
        for (; j + NUM_ACCUMULATORS <= count; j += NUM_ACCUMULATORS)
            for (int chain = 0; chain < NUM_ACCUMULATORS; chain++) {
                const T* address = v + (j + chain) * slot + i;
                _mm_prefetch(reinterpret_cast<const char*>(address + PREFETCH_SLOTS * slot), _MM_HINT_T0);
                const __m512 value = load_fp32(address, mask);
                for (int n = 0; n < N; n++) {
                    const __m512 probability = _mm512_set1_ps(probabilities[n * stride + j + chain]);
                    sums[n][chain] = _mm512_fmadd_ps(probability, value, sums[n][chain]);
                }
            }
        for (; j < count; j++) {
            const __m512 value = load_fp32(v + j * slot + i, mask);
            for (int n = 0; n < N; n++)
                sums[n][0] = _mm512_fmadd_ps(_mm512_set1_ps(probabilities[n * stride + j]), value, sums[n][0]);
        }
        for (int n = 0; n < N; n++) {
            for (int m = 1; m < NUM_ACCUMULATORS; m++) sums[n][0] = _mm512_add_ps(sums[n][0], sums[n][m]);
            store(y + n * v_dim + i, _mm512_mul_ps(sums[n][0], _mm512_set1_ps(factors[n])), mask);
        }
    }
}

// Replaces dot products by 2^(score - maximum). Returns the inverse of their sum, which includes the sink.
float exponentiate_scores(float* scores, int64_t count, const ScoreTransform& transform, const float* sink) {
    __m512 maxima = _mm512_set1_ps(sink == nullptr ? -INFINITY : *sink * LOG2E), total = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j += LANES) {
        const __mmask16 mask = tail_mask(count - j);
        const __m512 score = transform.score(_mm512_maskz_loadu_ps(mask, scores + j));
        _mm512_mask_storeu_ps(scores + j, mask, score);
        maxima = _mm512_mask_max_ps(maxima, mask, maxima, score);
    }
    const float max_score = _mm512_reduce_max_ps(maxima);
    for (int64_t j = 0; j < count; j += LANES) {
        const __mmask16 mask = tail_mask(count - j);
        const __m512 score = _mm512_maskz_loadu_ps(mask, scores + j);
        const __m512 probability = exp2(_mm512_sub_ps(score, _mm512_set1_ps(max_score)));
        _mm512_mask_storeu_ps(scores + j, mask, probability);
        total = _mm512_mask_add_ps(total, mask, total, probability);
    }
    const float sink_term = sink == nullptr ? 0 : std::exp2f(*sink * LOG2E - max_score);
    return 1 / (_mm512_reduce_add_ps(total) + sink_term);
}

template <typename T, int N>
void attend(const Args& args, int64_t row, int64_t kv_head, int64_t head) {
    const int64_t begin = args.spans[2 * row], count = args.spans[2 * row + 1] - begin, stride = round_up(count, LANES);
    float* q = scratch[Q_LHS].get<float>(N * args.dim);
    float* scores = scratch[SCORES].get<float>(N * stride);
    const T* queries = static_cast<const T*>(args.q) + row * args.q_row + head * args.q_head;
    for (int n = 0; n < N; n++)
        for (int64_t i = 0; i < args.dim; i += LANES) {
            const __mmask16 mask = tail_mask(args.dim - i);
            store(q + n * args.dim + i, load_fp32(queries + n * args.q_head + i, mask), mask);
        }
    const T* k = static_cast<const T*>(args.k) + row * args.k_row + begin * args.k_slot + kv_head * args.k_head;
    multiply_keys<T, N>(q, k, args.k_slot, count, args.dim, scores, stride);
    float factors[N];
    const ScoreTransform transform(args);
    for (int n = 0; n < N; n++) {
        const float* sink = args.sinks == nullptr ? nullptr : args.sinks + head + n;
        factors[n] = exponentiate_scores(scores + n * stride, count, transform, sink);
    }
    const T* v = static_cast<const T*>(args.v) + row * args.v_row + begin * args.v_slot + kv_head * args.v_head;
    T* y = static_cast<T*>(args.y) + (row * args.heads + head) * args.v_dim;
    sum_values<T, N>(scores, stride, v, args.v_slot, count, args.v_dim, factors, y);
}

template <typename T>
void run(const Args& args) {
    constexpr decltype(&attend<T, 1>) ATTEND[MAX_HEADS] = {attend<T, 1>, attend<T, 2>, attend<T, 3>, attend<T, 4>};
    const int64_t group = args.heads / args.kv_heads;
    int64_t slots = 0;
    for (int64_t row = 0; row < args.rows; row++) slots += args.spans[2 * row + 1] - args.spans[2 * row];
    [[maybe_unused]] const bool is_large = slots * args.heads * args.dim > MIN_PARALLEL_OPS;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(args.threads) if (is_large)
    for (int64_t row = 0; row < args.rows; row++)
        for (int64_t kv_head = 0; kv_head < args.kv_heads; kv_head++)
            for (int64_t n = 0; n < group; n += MAX_HEADS)
                ATTEND[std::min(MAX_HEADS, group - n) - 1](args, row, kv_head, kv_head * group + n);
}

}  // namespace

extern "C" {
int is_supported() { return 1; }
void decode_bf16(const Args* args) { run<bf16>(*args); }
void decode_fp32(const Args* args) { run<float>(*args); }
}

#else

extern "C" int is_supported() { return 0; }

#endif

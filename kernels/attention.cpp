// Causal softmax attention of packed documents on the CPU: forward, and backward from the log-sum-exp.
// If a document has more keys than queries, the queries belong to the last keys.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

extern "C" struct Args {
    const void *q, *k, *v;       // (T, H, D), (T, H_kv, D), (T, H_kv, V), last dimension contiguous
    void* y;                     // (T, H, V)
    float* lse;                  // (H, T): log2 of the sum of 2^score, scores times log2(e)
    const float* sinks;          // (H,) or null
    const void* grad;            // (T, H, V), as y
    void *dq, *dk, *dv;          // as q, k, v, contiguous; zero for keys that no query attends to
    float* delta;                // (H, T): dot products of y and its gradient
    const int64_t* offsets;      // (documents + 1,) bounds of the queries
    const int64_t* key_offsets;  // (documents + 1,) bounds of the keys, the last of which belong to the queries
    int64_t documents, tokens, keys, heads, kv_heads, dim, v_dim, window, chunk;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
    float scale, softcap;                                       // softcap 0: none
    int32_t threads;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "attention_tiles.h"
#include "attention_work.h"

namespace {

// Sizes of the arrays of a unit, padded to complete registers.
template <typename T>
struct Shapes {
    int64_t padded_keys, group;  // query heads that share the key head
    int64_t packs, v_packs;      // of a head of queries or keys, and of values
    int64_t dim, v_dim;          // as values

    Shapes(const Args& args, const WorkUnit& unit)
        : padded_keys(unit.padded_keys()),
          group(args.heads / args.kv_heads),
          packs(round_up(args.dim, LANES * PACK<T>) / PACK<T>),
          v_packs(round_up(args.v_dim, LANES * PACK<T>) / PACK<T>),
          dim(packs * PACK<T>),
          v_dim(v_packs * PACK<T>) {}
};

// ---- Forward ----

// Running maximum and sum of the scores of each query.
struct SoftmaxState {
    float max[QUERY_BLOCK], sum[QUERY_BLOCK];
};

// Online softmax: turns the scores of one query on `count` keys, of which [begin, end) are visible, into probabilities
// before normalization, and rescales the output so far.
template <typename T>
void update_softmax(float* scores, T* probs, int64_t count, int64_t begin, int64_t end, const ScoreTransform& transform,
                    float& max, float& sum, float* out, int64_t v_dim) {
    const __m512 minus_infinity = _mm512_set1_ps(-INFINITY);
    __m512 maxima = minus_infinity;
    for (int64_t i = 0; i < count; i += LANES) {
        __m512 x = transform.score(_mm512_loadu_ps(scores + i));
        if (i < begin || i + LANES > end) {
            const bool is_masked = end <= i || begin >= i + LANES;
            const __mmask16 visible = is_masked ? 0 : tail_mask(end - i) & ~tail_mask(std::max<int64_t>(begin - i, 0));
            x = _mm512_mask_blend_ps(visible, minus_infinity, x);
        }
        maxima = _mm512_max_ps(maxima, x);
        _mm512_storeu_ps(scores + i, x);
    }
    const float old_max = max;
    max = std::max(old_max, _mm512_reduce_max_ps(maxima));
    __m512 sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        const __m512 x = exp2(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(max)));
        sums = _mm512_add_ps(sums, x);
        store(probs + i, x, 0xffff);
    }
    const __m512 correction = exp2(_mm512_sub_ps(_mm512_set1_ps(old_max), _mm512_set1_ps(max)));
    sum = sum * _mm512_cvtss_f32(correction) + _mm512_reduce_add_ps(sums);
    if (max != old_max)
        for (int64_t i = 0; i < v_dim; i += LANES)
            _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), correction));
}

// Forward pass of a unit: keys and values are packed once, for all of its queries.
template <typename T>
struct ForwardUnit {
    static constexpr int64_t PROBS_STRIDE = KEY_BLOCK / PACK<T>;
    const Args& args;
    const WorkUnit& unit;
    const Shapes<T> shapes;
    const ScoreTransform transform;
    pack_t *k_rhs, *v_rhs, *q_lhs, *probs;
    float *scores, *out;
    SoftmaxState& state;

    ForwardUnit(const Args& args, const WorkUnit& unit)
        : args(args),
          unit(unit),
          shapes(args, unit),
          transform(args),
          k_rhs(scratch[K_RHS].get<pack_t>(shapes.padded_keys * shapes.packs)),
          v_rhs(scratch[V_RHS].get<pack_t>(shapes.padded_keys * shapes.v_packs)),
          q_lhs(scratch[Q_LHS].get<pack_t>(QUERY_BLOCK * shapes.packs)),
          probs(scratch[PROBS].get<pack_t>(QUERY_BLOCK * PROBS_STRIDE)),
          scores(scratch[SCORES].get<float>(QUERY_BLOCK * KEY_BLOCK)),
          out(scratch[OUTPUT].get<float>(QUERY_BLOCK * shapes.v_dim)),
          state(*scratch[QUERY_STATS].get<SoftmaxState>(1)) {}

    void pack_keys_and_values() {
        const int64_t first = unit.first_key + unit.key_begin, padded = shapes.padded_keys, count = unit.num_keys();
        const T* k = static_cast<const T*>(args.k) + first * args.k_token + unit.kv_head * args.k_head;
        const T* v = static_cast<const T*>(args.v) + first * args.v_token + unit.kv_head * args.v_head;
        auto* staging = scratch[STAGING].get<pack_t>(padded * std::max(shapes.packs, shapes.v_packs));
        copy_rows(k, args.k_token, count, args.dim, staging, shapes.packs, padded);
        transpose(staging, padded, shapes.packs, shapes.packs, k_rhs, padded);
        copy_rows(v, args.v_token, count, args.v_dim, staging, shapes.v_packs, padded);
        pack_row_pairs<T>(staging, padded, shapes.v_packs, v_rhs);
    }

    // The queries [query, query + count) of a head on a block of keys; `key` is relative to the first one of the unit.
    void attend_to_block(int64_t query, int64_t count, int64_t rows, int64_t key, int64_t num_keys) {
        const int64_t padded = shapes.padded_keys, v_dim = shapes.v_dim;
        matmul<T>({q_lhs, shapes.packs}, {k_rhs + key, padded}, {scores, KEY_BLOCK, false}, rows, num_keys,
                  shapes.packs);
        for (int64_t r = 0; r < count; r++) {
            const int64_t block = unit.key_begin + key;
            const int64_t begin = first_visible_key(args, query + r) - block, end = query + r + 1 - block;
            update_softmax(scores + r * KEY_BLOCK, reinterpret_cast<T*>(probs + r * PROBS_STRIDE), num_keys, begin, end,
                           transform, state.max[r], state.sum[r], out + r * v_dim, v_dim);
        }
        matmul<T>({probs, PROBS_STRIDE}, {v_rhs + key / PACK<T> * v_dim, v_dim}, {out, v_dim, true}, rows, v_dim,
                  num_keys / PACK<T>);
    }

    void store_output(int64_t head, int64_t token, int64_t count) {
        for (int64_t r = 0; r < count; r++) {
            T* y = static_cast<T*>(args.y) + ((token + r) * args.heads + head) * args.v_dim;
            const __m512 sum = _mm512_set1_ps(state.sum[r]);
            for (int64_t i = 0; i < args.v_dim; i += LANES) {
                const __m512 x = _mm512_loadu_ps(out + r * shapes.v_dim + i);
                store(y + i, _mm512_div_ps(x, sum), tail_mask(args.v_dim - i));
            }
            args.lse[head * args.tokens + token + r] = state.max[r] + std::log2(state.sum[r]);
        }
    }

    void attend(int64_t head, int64_t query) {
        const int64_t count = std::min(QUERY_BLOCK, unit.query_end - query), rows = round_up(count, TILE_ROWS);
        const int64_t token = unit.first_query + query, last = round_up(query + count - unit.key_begin, LANES);
        const T* q = static_cast<const T*>(args.q) + token * args.q_token + head * args.q_head;
        copy_rows(q, args.q_token, count, args.dim, q_lhs, shapes.packs, rows);
        std::fill_n(out, rows * shapes.v_dim, 0.0f);
        std::fill_n(state.max, count, args.sinks ? args.sinks[head] * LOG2E : -INFINITY);
        std::fill_n(state.sum, count, args.sinks ? 1.0f : 0.0f);
        for (int64_t key = round_down(first_visible_key(args, query) - unit.key_begin, LANES); key < last;
             key += KEY_BLOCK)
            attend_to_block(query, count, rows, key, std::min(KEY_BLOCK, last - key));
        store_output(head, token, count);
    }

    void run() {
        pack_keys_and_values();
        for (int64_t i = 0; i < shapes.group; i++)
            for (int64_t query = unit.query_begin; query < unit.query_end; query += QUERY_BLOCK)
                attend(unit.kv_head * shapes.group + i, query);
    }
};

// ---- Backward ----

// Values of queries, one per lane: log-sum-exp, and dot product of output and output gradient.
struct QueryStats {
    float lse[BWD_QUERY_BLOCK], delta[BWD_QUERY_BLOCK];
};

// Computes probabilities and gradients of scores from scores and gradients of probabilities, with keys along the rows
// and queries along the lanes. Both are left-hand sides of matmuls over queries; the gradients also are a right-hand
// side over keys.
template <typename T>
struct ScoreGradients {
    const float *scores, *grad_probs;  // (BWD_KEY_BLOCK, BWD_QUERY_BLOCK)
    T *probs, *lhs;
    pack_t* rhs;

    // `offset`: query of the first lane minus key of the first row.
    __m512 compute_lanes(const Args& args, const ScoreTransform& transform, const QueryStats& stats, int64_t row,
                         int64_t offset, int64_t lane) const {
        const int64_t index = row * BWD_QUERY_BLOCK + lane;
        const __m512 score = transform.score(_mm512_loadu_ps(scores + index));
        __m512 prob = exp2(_mm512_sub_ps(score, _mm512_loadu_ps(stats.lse + lane)));
        const int64_t distance = offset + lane - row;  // from the key to the query of the first lane
        if (distance < 0 || distance + LANES > args.window) {
            const __mmask16 is_causal = distance >= 0 ? 0xffff : distance <= -LANES ? 0 : ~tail_mask(-distance);
            prob = _mm512_maskz_mov_ps(is_causal & tail_mask(std::max<int64_t>(0, args.window - distance)), prob);
        }
        store(probs + index, prob, 0xffff);
        __m512 grad_score = _mm512_sub_ps(_mm512_loadu_ps(grad_probs + index), _mm512_loadu_ps(stats.delta + lane));
        grad_score = _mm512_mul_ps(grad_score, prob);
        if (transform.softcap != 0) grad_score = _mm512_mul_ps(grad_score, transform.softcap_derivative(score));
        store(lhs + index, grad_score, 0xffff);
        return grad_score;
    }

    void compute(const Args& args, const ScoreTransform& transform, const QueryStats& stats, int64_t rows,
                 int64_t offset, int64_t first_lane, int64_t lanes) const {
        for (int64_t r = 0; r < rows; r += PACK<T>)
            for (int64_t lane = first_lane; lane < lanes; lane += LANES) {
                const __m512 x = compute_lanes(args, transform, stats, r, offset, lane);
                pack_t* target = rhs + r / PACK<T> * BWD_QUERY_BLOCK + lane;
                if (PACK<T> == 1) {
                    _mm512_storeu_ps(reinterpret_cast<float*>(target), x);
                } else {
                    const __m512 next = compute_lanes(args, transform, stats, r + 1, offset, lane);
                    _mm512_storeu_si512(target, interleave(to_bf16(x), to_bf16(next)));
                }
            }
    }
};

// Stores source (rows, columns) * scale.
template <typename T>
void store_scaled(const float* source, int64_t stride, int64_t rows, int64_t columns, float scale, T* target,
                  int64_t target_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i += LANES) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(source + r * stride + i), _mm512_set1_ps(scale));
            store(target + r * target_stride + i, x, tail_mask(columns - i));
        }
}

template <typename T>
float dot(const T* a, const T* b, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum = _mm512_fmadd_ps(load_fp32(a + i), load_fp32(b + i), sum);
    if (i < count) {
        T x[LANES] = {}, y[LANES] = {};
        std::copy(a + i, a + count, x);
        std::copy(b + i, b + count, y);
        sum = _mm512_fmadd_ps(load_fp32(x), load_fp32(y), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

// Backward pass of a unit. Sums up dk (padded_keys, dim), before the scale, and dv (padded_keys, v_dim).
template <typename T>
struct BackwardUnit {
    static constexpr int64_t STRIDE = BWD_QUERY_BLOCK / PACK<T>;
    const Args& args;
    const WorkUnit& unit;
    const Shapes<T> shapes;
    const ScoreTransform transform;
    float *dk, *dv;
    pack_t *staging, *k_lhs, *k_transposed, *v_lhs, *q_transposed, *q_rhs, *grad_transposed, *grad_rhs;
    pack_t *probs, *grad_scores_lhs, *grad_scores_rhs;
    float *scores, *grad_probs, *dq;
    QueryStats& stats;

    BackwardUnit(const Args& args, const WorkUnit& unit, float* dk, float* dv)
        : args(args),
          unit(unit),
          shapes(args, unit),
          transform(args),
          dk(dk),
          dv(dv),
          staging(scratch[STAGING].get<pack_t>(
              std::max(shapes.padded_keys * shapes.packs, BWD_QUERY_BLOCK * std::max(shapes.dim, shapes.v_dim)))),
          k_lhs(scratch[K_LHS].get<pack_t>(shapes.padded_keys * shapes.packs)),
          k_transposed(scratch[K_TRANSPOSED].get<pack_t>(shapes.padded_keys * shapes.packs)),
          v_lhs(scratch[V_LHS].get<pack_t>(shapes.padded_keys * shapes.v_packs)),
          q_transposed(scratch[Q_TRANSPOSED].get<pack_t>(BWD_QUERY_BLOCK * shapes.packs)),
          q_rhs(scratch[Q_RHS].get<pack_t>(BWD_QUERY_BLOCK * shapes.packs)),
          grad_transposed(scratch[GRAD_TRANSPOSED].get<pack_t>(BWD_QUERY_BLOCK * shapes.v_packs)),
          grad_rhs(scratch[GRAD_RHS].get<pack_t>(BWD_QUERY_BLOCK * shapes.v_packs)),
          probs(scratch[PROBS].get<pack_t>(BWD_KEY_BLOCK * STRIDE)),
          grad_scores_lhs(scratch[GRAD_SCORES_LHS].get<pack_t>(BWD_KEY_BLOCK * STRIDE)),
          grad_scores_rhs(scratch[GRAD_SCORES_RHS].get<pack_t>(BWD_KEY_BLOCK / PACK<T> * BWD_QUERY_BLOCK)),
          scores(scratch[SCORES].get<float>(BWD_KEY_BLOCK * BWD_QUERY_BLOCK)),
          grad_probs(scratch[GRAD_PROBS].get<float>(BWD_KEY_BLOCK * BWD_QUERY_BLOCK)),
          dq(scratch[OUTPUT].get<float>(shapes.dim * BWD_QUERY_BLOCK)),
          stats(*scratch[QUERY_STATS].get<QueryStats>(1)) {}

    void pack_keys_and_values() {
        const int64_t first = unit.first_key + unit.key_begin, padded = shapes.padded_keys, count = unit.num_keys();
        const T* k = static_cast<const T*>(args.k) + first * args.k_token + unit.kv_head * args.k_head;
        const T* v = static_cast<const T*>(args.v) + first * args.v_token + unit.kv_head * args.v_head;
        copy_rows(k, args.k_token, count, args.dim, k_lhs, shapes.packs, padded);
        transpose(k_lhs, padded, shapes.packs, shapes.packs, staging, padded);
        pack_column_pairs<T>(staging, shapes.packs, padded, k_transposed);
        copy_rows(v, args.v_token, count, args.v_dim, v_lhs, shapes.v_packs, padded);
    }

    void pack_queries(int64_t head, int64_t token, int64_t count, int64_t lanes) {
        const int64_t offset = (token * args.heads + head) * args.v_dim, stride = args.heads * args.v_dim;
        const T *grad = static_cast<const T*>(args.grad) + offset, *y = static_cast<const T*>(args.y) + offset;
        const T* q = static_cast<const T*>(args.q) + token * args.q_token + head * args.q_head;
        copy_rows(q, args.q_token, count, args.dim, staging, shapes.packs, lanes);
        transpose(staging, lanes, shapes.packs, shapes.packs, q_transposed, lanes);
        pack_row_pairs<T>(staging, lanes, shapes.packs, q_rhs);
        copy_rows(grad, stride, count, args.v_dim, staging, shapes.v_packs, lanes);
        transpose(staging, lanes, shapes.v_packs, shapes.v_packs, grad_transposed, lanes);
        pack_row_pairs<T>(staging, lanes, shapes.v_packs, grad_rhs);
        std::fill_n(stats.lse, BWD_QUERY_BLOCK, INFINITY);  // queries beyond the end have zero probabilities
        std::fill_n(stats.delta, BWD_QUERY_BLOCK, 0.0f);
        for (int64_t i = 0; i < count; i++) {
            const int64_t index = head * args.tokens + token + i;
            stats.lse[i] = args.lse[index];
            stats.delta[i] = args.delta[index] = dot(grad + i * stride, y + i * stride, args.v_dim);
        }
    }

    // The gradients of queries from `query` on and a block of keys; `key` is relative to the first one of the unit.
    void add_block(int64_t query, int64_t lanes, int64_t key, int64_t rows) {
        const int64_t dim = shapes.dim, v_dim = shapes.v_dim, packs = shapes.packs, v_packs = shapes.v_packs;
        const int64_t offset = query - unit.key_begin - key;
        const int64_t first = round_down(std::max<int64_t>(0, -offset), LANES), count = lanes - first;
        const ScoreGradients<T> gradients{scores, grad_probs, reinterpret_cast<T*>(probs),
                                          reinterpret_cast<T*>(grad_scores_lhs), grad_scores_rhs};
        matmul<T>({k_lhs + key * packs, packs}, {q_transposed + first, lanes}, {scores + first, BWD_QUERY_BLOCK, false},
                  rows, count, packs);
        matmul<T>({v_lhs + key * v_packs, v_packs}, {grad_transposed + first, lanes},
                  {grad_probs + first, BWD_QUERY_BLOCK, false}, rows, count, v_packs);
        gradients.compute(args, transform, stats, rows, offset, first, lanes);
        matmul<T>({probs + first / PACK<T>, STRIDE}, {grad_rhs + first / PACK<T> * v_dim, v_dim},
                  {dv + key * v_dim, v_dim, true}, rows, v_dim, count / PACK<T>);
        matmul<T>({grad_scores_lhs + first / PACK<T>, STRIDE}, {q_rhs + first / PACK<T> * dim, dim},
                  {dk + key * dim, dim, true}, rows, dim, count / PACK<T>);
        matmul<T>({k_transposed + key / PACK<T>, shapes.padded_keys / PACK<T>},
                  {grad_scores_rhs + first, BWD_QUERY_BLOCK}, {dq + first, lanes, true}, dim, count, rows / PACK<T>);
    }

    void add_queries(int64_t head, int64_t query) {
        const int64_t count = std::min(BWD_QUERY_BLOCK, unit.query_end - query), lanes = round_up(count, LANES);
        const int64_t token = unit.first_query + query, last = round_up(query + count - unit.key_begin, LANES);
        pack_queries(head, token, count, lanes);
        std::fill_n(dq, shapes.dim * lanes, 0.0f);
        for (int64_t key = round_down(first_visible_key(args, query) - unit.key_begin, LANES); key < last;
             key += BWD_KEY_BLOCK)
            add_block(query, lanes, key, std::min(BWD_KEY_BLOCK, last - key));
        transpose(reinterpret_cast<pack_t*>(dq), shapes.dim, lanes, lanes, staging, shapes.dim);
        store_scaled(reinterpret_cast<float*>(staging), shapes.dim, count, args.dim, args.scale,
                     static_cast<T*>(args.dq) + (token * args.heads + head) * args.dim, args.heads * args.dim);
    }

    void run() {
        pack_keys_and_values();
        std::fill_n(dk, shapes.padded_keys * shapes.dim, 0.0f);
        std::fill_n(dv, shapes.padded_keys * shapes.v_dim, 0.0f);
        for (int64_t i = 0; i < shapes.group; i++)
            for (int64_t query = unit.query_begin; query < unit.query_end; query += BWD_QUERY_BLOCK)
                add_queries(unit.kv_head * shapes.group + i, query);
    }
};

// Stores dk and dv of `count` keys.
template <typename T>
void store_key_gradients(const Args& args, const WorkUnit& unit, int64_t key, int64_t count, const float* dk,
                         int64_t dim, const float* dv, int64_t v_dim) {
    const int64_t row = (unit.first_key + key) * args.kv_heads + unit.kv_head;
    store_scaled(dk, dim, count, args.dim, args.scale, static_cast<T*>(args.dk) + row * args.dim,
                 args.kv_heads * args.dim);
    store_scaled(dv, v_dim, count, args.v_dim, 1, static_cast<T*>(args.dv) + row * args.v_dim,
                 args.kv_heads * args.v_dim);
}

// Gradients of the keys of a unit, mostly those of its queries: the sum over the following units, which attend to them.
template <typename T>
void sum_partials(const Args& args, const WorkUnit* unit, const float* partials, int64_t dim, int64_t v_dim) {
    for (int64_t key = unit->grad_key_begin; key < unit->query_end; key++) {
        float* sum = scratch[STAGING].get<float>(dim + v_dim);
        std::fill_n(sum, dim + v_dim, 0.0f);
        for (const WorkUnit* other = unit; other < unit + unit->num_following && other->key_begin <= key; other++) {
            const float* dk = partials + other->partial_offset + (key - other->key_begin) * dim;
            const float* dv = partials + other->partial_offset + other->padded_keys() * dim;
            dv += (key - other->key_begin) * v_dim;
            for (int64_t i = 0; i < dim; i++) sum[i] += dk[i];
            for (int64_t i = 0; i < v_dim; i++) sum[dim + i] += dv[i];
        }
        store_key_gradients<T>(args, *unit, key, 1, sum, dim, sum + dim, v_dim);
    }
}

// A unit stores the gradients of its keys if no other unit attends to them, else partial sums in separate memory.
template <typename T>
void run_backward_unit(const Args& args, const WorkUnit& unit, float* partials, int64_t dim, int64_t v_dim) {
    const int64_t size = unit.padded_keys() * dim;
    float* dk = unit.owns_keys ? scratch[DK].get<float>(size) : partials + unit.partial_offset;
    float* dv = unit.owns_keys ? scratch[DV].get<float>(unit.padded_keys() * v_dim) : dk + size;
    BackwardUnit<T>(args, unit, dk, dv).run();
    if (unit.owns_keys) store_key_gradients<T>(args, unit, unit.key_begin, unit.num_keys(), dk, dim, dv, v_dim);
}

template <typename T>
bool run_forward(const Args& args) {
    if (!are_documents_valid(args)) return false;
    const auto units = split_work(args);
    const auto indices = sort_by_cost(units);
#pragma omp parallel for schedule(dynamic) num_threads(args.threads) if (units.size() > 1)
    for (size_t i = 0; i < indices.size(); i++) ForwardUnit<T>(args, units[indices[i]]).run();
    return true;
}

template <typename T>
bool run_backward(const Args& args) {
    if (!are_documents_valid(args)) return false;
    auto units = split_work(args);
    const auto indices = sort_by_cost(units);
    const int64_t dim = round_up(args.dim, LANES * PACK<T>), v_dim = round_up(args.v_dim, LANES * PACK<T>);
    int64_t size = 0;
    for (auto& unit : units) {
        unit.partial_offset = size;
        if (!unit.owns_keys) size += unit.padded_keys() * (dim + v_dim);
    }
    const std::unique_ptr<float[]> partials(new float[size]);
#pragma omp parallel for schedule(dynamic) num_threads(args.threads) if (units.size() > 1)
    for (size_t i = 0; i < indices.size(); i++)
        run_backward_unit<T>(args, units[indices[i]], partials.get(), dim, v_dim);
    if (size == 0) return true;
#pragma omp parallel for schedule(dynamic) num_threads(args.threads) if (units.size() > 1)
    for (size_t i = 0; i < units.size(); i++)
        if (!units[i].owns_keys) sum_partials<T>(args, &units[i], partials.get(), dim, v_dim);
    return true;
}

}  // namespace

extern "C" {
int is_supported() { return 1; }
// Return 0, and do nothing, if the documents are not valid.
int forward_bf16(const Args* args) { return run_forward<bf16>(*args); }
int forward_fp32(const Args* args) { return run_forward<float>(*args); }
int backward_bf16(const Args* args) { return run_backward<bf16>(*args); }
int backward_fp32(const Args* args) { return run_backward<float>(*args); }
}

#else

extern "C" int is_supported() { return 0; }

#endif

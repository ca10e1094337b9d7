// Causal softmax attention of packed documents on the CPU: forward, and backward from the log-sum-exp.
//
// A unit of work is one key head and a range of the queries of one document, for all query heads that share the key
// head. If a document has more keys than queries, the queries belong to the last keys. Units depend only on the lengths
// of documents, so that results do not depend on the number of threads.
//
// Matmuls use cells of 32 bits, two bf16 values or one fp32 value: the left side is (rows, cells), the right side
// (cells, columns), with the two values of a cell adjacent in the reduced dimension.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

extern "C" struct Call {
    const void *q, *k, *v;     // (T, H, D), (T, H_kv, D), (T, H_kv, V), last dimension contiguous
    void* y;                   // (T, H, V)
    float* lse;                // (H, T): log2 of the sum of 2^score, scores times log2(e)
    const float* sinks;        // (H,) or null
    const void* grad;          // (T, H, V), as y
    void *dq, *dk, *dv;        // as q, k, v, contiguous; zero for keys that no query attends to
    float* delta;              // (H, T): dot products of y and its gradient
    const int64_t* offsets;    // (documents + 1,) bounds of the queries
    const int64_t* key_offsets;  // (documents + 1,) bounds of the keys, the last of which belong to the queries
    int64_t documents, tokens, keys, heads, kv_heads, dim, v_dim, window, chunk;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
    float scale, softcap;      // softcap 0: none
    int32_t threads;
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "attention_tiles.h"

namespace {

// ---- Units ----

struct Unit {
    int64_t start;         // first key of the document; the following fields are relative to it
    int64_t first;         // index of the query of the first key, which may not exist
    int64_t query, end;    // range of queries
    int64_t key;           // first key that any of them attends to
    int64_t own;           // first key whose gradients this unit sums up
    int64_t head;          // key head
    int64_t parts;         // number of remaining units of this document and head, including this one
    bool alone;            // no other unit has gradients of these keys
    int64_t room;          // offset of the partial sums otherwise
    double work;

    int64_t keys() const { return up(end - key, LANES); }
};

int64_t oldest(const Call& c, int64_t query) { return std::max<int64_t>(0, query - c.window + 1); }

// A document, or a chunk of one. The first `lacking` keys have no queries.
struct Piece {
    int64_t start, first, length, lacking;

    double pairs(int64_t window) const {
        const int64_t queries = length - lacking;
        return 0.5 * queries * std::min(queries + 2 * lacking, 2 * window);
    }
};

// Whether the documents fill queries and keys, in order, and none of them has more queries than keys.
bool fits(const Call& c) {
    const int64_t *q = c.offsets, *k = c.key_offsets;
    for (int64_t d = 0; d < c.documents; d++) {
        const bool queries = 0 <= q[d] && q[d] <= q[d + 1] && q[d + 1] <= c.tokens;
        const bool keys = 0 <= k[d] && k[d] <= k[d + 1] && k[d + 1] <= c.keys;
        if (!queries || !keys || q[d + 1] - q[d] > k[d + 1] - k[d]) return false;
    }
    return q[0] == 0 && k[0] == 0 && q[c.documents] == c.tokens && k[c.documents] == c.keys;
}

std::vector<Piece> pieces(const Call& c) {
    std::vector<Piece> found;
    for (int64_t d = 0; d < c.documents; d++) {
        const int64_t begin = c.key_offsets[d], length = c.key_offsets[d + 1] - begin;
        const int64_t lacking = length - (c.offsets[d + 1] - c.offsets[d]);
        for (int64_t at = lacking - lacking % c.chunk; at < length; at += c.chunk)
            found.push_back({begin + at, c.offsets[d] - lacking + at, std::min(c.chunk, length - at),
                             std::max<int64_t>(0, lacking - at)});
    }
    return found;
}

std::vector<Unit> units(const Call& c) {
    const auto all = pieces(c);
    double total = 0;
    for (const Piece& p : all) total += p.pairs(c.window);
    const double most = std::max(total * c.kv_heads / UNITS, 1.0 * BACK_QUERIES * BACK_QUERIES);
    std::vector<Unit> found;
    for (const Piece& p : all)
        for (int64_t head = 0; head < c.kv_heads; head++) {
            const size_t before = found.size();
            for (int64_t query = p.lacking, end = query; query < p.length; query = end) {
                double work = 0;
                for (; end < p.length && work < most; end = std::min(end + BACK_QUERIES, p.length))
                    work += 1.0 * BACK_QUERIES * (end + BACK_QUERIES / 2 - oldest(c, end));
                const int64_t key = oldest(c, query), own = query == p.lacking ? key : query;
                found.push_back({p.start, p.first, query, end, key, own, head, 0, false, 0, work});
            }
            for (size_t i = before; i < found.size(); i++) {
                found[i].parts = found.size() - i;
                found[i].alone = found.size() - before == 1;
            }
        }
    return found;
}

// Largest units first, for load balance.
std::vector<int64_t> order(const std::vector<Unit>& all) {
    std::vector<int64_t> by(all.size());
    std::iota(by.begin(), by.end(), 0);
    std::stable_sort(by.begin(), by.end(), [&](int64_t a, int64_t b) { return all[a].work > all[b].work; });
    return by;
}

// ---- Forward ----

struct Line {
    float most[QUERIES], sum[QUERIES];  // running maximum and sum of the scores of a query
};

// Online softmax: turns the scores of one query on `columns` keys, of which [from, to) are visible, into weights.
template <typename T>
void soften(float* scores, T* shares, int64_t columns, int64_t from, int64_t to, const Scale& scale, float& most,
                 float& sum, float* out, int64_t width) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 high = nothing;
    for (int64_t c = 0; c < columns; c += LANES) {
        __m512 x = scale.score(_mm512_loadu_ps(scores + c));
        if (c < from || c + LANES > to) {
            const bool none = to <= c || from >= c + LANES;
            const __mmask16 seen = none ? 0 : first(to - c) & ~first(std::max<int64_t>(from - c, 0));
            x = _mm512_mask_blend_ps(seen, nothing, x);
        }
        high = _mm512_max_ps(high, x);
        _mm512_storeu_ps(scores + c, x);
    }
    const float top = std::max(most, _mm512_reduce_max_ps(high));
    const __m512 tops = _mm512_set1_ps(top);
    __m512 total = _mm512_setzero_ps();
    for (int64_t c = 0; c < columns; c += LANES) {
        const __m512 x = exp2(_mm512_sub_ps(_mm512_loadu_ps(scores + c), tops));
        total = _mm512_add_ps(total, x);
        store(shares + c, x, 0xffff);
    }
    const __m512 less = exp2(_mm512_sub_ps(_mm512_set1_ps(most), tops));
    sum = sum * _mm512_cvtss_f32(less) + _mm512_reduce_add_ps(total);
    if (top != most)
        for (int64_t c = 0; c < width; c += LANES)
            _mm512_storeu_ps(out + c, _mm512_mul_ps(_mm512_loadu_ps(out + c), less));
    most = top;
}

template <typename T>
void forward(const Call& c, const Unit& u) {
    constexpr int64_t P = PER<T>, SHARE = KEYS / P;
    const Scale scale(c);
    const int64_t keys = u.keys(), count = u.end - u.key, group = c.heads / c.kv_heads;
    const int64_t cells = up(c.dim, LANES * P) / P, v_cells = up(c.v_dim, LANES * P) / P, width = v_cells * P;
    const int64_t base = u.start + u.key;
    const T* k = static_cast<const T*>(c.k) + base * c.k_token + u.head * c.k_head;
    const T* v = static_cast<const T*>(c.v) + base * c.v_token + u.head * c.v_head;
    auto* raw = room[RAW].take<cell>(keys * std::max(cells, v_cells));
    auto* k_right = room[K_RIGHT].take<cell>(keys * cells);
    auto* v_right = room[V_RIGHT].take<cell>(keys * v_cells);
    gather(k, c.k_token, count, c.dim, raw, cells, keys);
    turn(raw, keys, cells, cells, k_right, keys);
    gather(v, c.v_token, count, c.v_dim, raw, v_cells, keys);
    pair<T>(raw, keys, v_cells, v_right);
    auto* q_left = room[Q_LEFT].take<cell>(QUERIES * cells);
    auto* scores = room[SCORES].take<float>(QUERIES * KEYS);
    auto* shares = room[SHARES].take<cell>(QUERIES * SHARE);
    auto* out = room[OUT].take<float>(QUERIES * width);
    auto& line = *room[LINES].take<Line>(1);
    for (int64_t head = u.head * group; head < (u.head + 1) * group; head++)
        for (int64_t query = u.query; query < u.end; query += QUERIES) {
            const int64_t n = std::min(QUERIES, u.end - query), rows = up(n, ROWS), token = u.first + query;
            const T* q = static_cast<const T*>(c.q) + token * c.q_token + head * c.q_head;
            gather(q, c.q_token, n, c.dim, q_left, cells, rows);
            std::fill_n(out, rows * width, 0.0f);
            std::fill_n(line.most, n, c.sinks ? c.sinks[head] * LOG2E : -INFINITY);
            std::fill_n(line.sum, n, c.sinks ? 1.0f : 0.0f);
            const int64_t last = up(query + n - u.key, LANES);
            for (int64_t key = down(oldest(c, query) - u.key, LANES); key < last; key += KEYS) {
                const int64_t columns = std::min(KEYS, last - key);
                product<T>({q_left, cells}, {k_right + key, keys}, {scores, KEYS, false}, rows, columns, cells);
                for (int64_t r = 0; r < n; r++) {
                    const int64_t from = oldest(c, query + r) - u.key - key, to = query + r + 1 - u.key - key;
                    soften(scores + r * KEYS, reinterpret_cast<T*>(shares + r * SHARE), columns, from, to, scale,
                           line.most[r], line.sum[r], out + r * width, width);
                }
                product<T>({shares, SHARE}, {v_right + key / P * width, width}, {out, width, true}, rows, width,
                           columns / P);
            }
            for (int64_t r = 0; r < n; r++) {
                T* y = static_cast<T*>(c.y) + ((token + r) * c.heads + head) * c.v_dim;
                const __m512 sum = _mm512_set1_ps(line.sum[r]);
                for (int64_t i = 0; i < c.v_dim; i += LANES)
                    store(y + i, _mm512_div_ps(_mm512_loadu_ps(out + r * width + i), sum), first(c.v_dim - i));
                c.lse[head * c.tokens + token + r] = line.most[r] + std::log2(line.sum[r]);
            }
        }
}

// ---- Backward ----

// Values of queries, one per lane: log-sum-exp, and dot product of output and output gradient.
struct Turned {
    float lse[BACK_QUERIES], delta[BACK_QUERIES];
};

// Computes probabilities and score gradients from scores and probability gradients, with keys along the rows and
// queries along the lanes. Both are left sides of matmuls over queries; score gradients also are a right side over keys.
template <typename T>
struct Change {
    const float *scores, *changes;  // (BACK_KEYS, BACK_QUERIES)
    T *shares, *left;
    cell* right;

    // `edge`: query of the first lane minus key of the first row.
    __m512 row(const Call& c, const Scale& scale, const Turned& line, int64_t r, int64_t edge, int64_t lane) const {
        const int64_t at = r * BACK_QUERIES + lane;
        const __m512 score = scale.score(_mm512_loadu_ps(scores + at));
        __m512 share = exp2(_mm512_sub_ps(score, _mm512_loadu_ps(line.lse + lane)));
        const int64_t age = edge + lane - r;  // distance between the first query and the key
        if (age < 0 || age + LANES > c.window) {
            const __mmask16 young = age >= 0 ? 0xffff : age <= -LANES ? 0 : ~first(-age);
            share = _mm512_maskz_mov_ps(young & first(std::max<int64_t>(0, c.window - age)), share);
        }
        store(shares + at, share, 0xffff);
        __m512 change = _mm512_sub_ps(_mm512_loadu_ps(changes + at), _mm512_loadu_ps(line.delta + lane));
        change = _mm512_mul_ps(change, share);
        if (scale.cap != 0) change = _mm512_mul_ps(change, scale.slope(score));
        store(left + at, change, 0xffff);
        return change;
    }

    void operator()(const Call& c, const Scale& scale, const Turned& line, int64_t rows, int64_t edge, int64_t from,
                    int64_t to) const {
        for (int64_t r = 0; r < rows; r += PER<T>)
            for (int64_t lane = from; lane < to; lane += LANES) {
                const __m512 x = row(c, scale, line, r, edge, lane);
                cell* at = right + r / PER<T> * BACK_QUERIES + lane;
                if (PER<T> == 1)
                    _mm512_storeu_ps(reinterpret_cast<float*>(at), x);
                else
                    _mm512_storeu_si512(at, mixed(narrow(x), narrow(row(c, scale, line, r + 1, edge, lane))));
            }
    }
};

// Writes y (rows, columns) * scale contiguously, as one of `heads` heads.
template <typename T>
void scatter(const float* from, int64_t stride, int64_t rows, int64_t columns, float scale, T* to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i += LANES) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(from + r * stride + i), _mm512_set1_ps(scale));
            store(to + r * to_stride + i, x, first(columns - i));
        }
}

template <typename T>
float dot(const T* a, const T* b, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum = _mm512_fmadd_ps(wide(a + i), wide(b + i), sum);
    if (i < count) {
        T x[LANES] = {}, y[LANES] = {};
        std::copy(a + i, a + count, x);
        std::copy(b + i, b + count, y);
        sum = _mm512_fmadd_ps(wide(x), wide(y), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

template <typename T>
void backward(const Call& c, const Unit& u, float* dk, float* dv) {
    constexpr int64_t P = PER<T>, LINE = BACK_QUERIES / P;
    const Scale scale(c);
    const int64_t keys = u.keys(), count = u.end - u.key, group = c.heads / c.kv_heads;
    const int64_t cells = up(c.dim, LANES * P) / P, v_cells = up(c.v_dim, LANES * P) / P;
    const int64_t dim = cells * P, width = v_cells * P, base = u.start + u.key;
    auto* raw = room[RAW].take<cell>(std::max(keys * cells, BACK_QUERIES * std::max(dim, width)));
    auto* k_left = room[K_LEFT].take<cell>(keys * cells);
    auto* k_turned = room[K_TURNED].take<cell>(keys * cells);
    auto* v_left = room[V_LEFT].take<cell>(keys * v_cells);
    const T* k = static_cast<const T*>(c.k) + base * c.k_token + u.head * c.k_head;
    const T* v = static_cast<const T*>(c.v) + base * c.v_token + u.head * c.v_head;
    gather(k, c.k_token, count, c.dim, k_left, cells, keys);
    turn(k_left, keys, cells, cells, raw, keys);
    split<T>(raw, cells, keys, k_turned);
    gather(v, c.v_token, count, c.v_dim, v_left, v_cells, keys);
    auto* q_turned = room[Q_TURNED].take<cell>(BACK_QUERIES * cells);
    auto* q_right = room[Q_RIGHT].take<cell>(BACK_QUERIES * cells);
    auto* g_turned = room[G_TURNED].take<cell>(BACK_QUERIES * v_cells);
    auto* g_right = room[G_RIGHT].take<cell>(BACK_QUERIES * v_cells);
    auto* scores = room[SCORES].take<float>(BACK_KEYS * BACK_QUERIES);
    auto* changes = room[CHANGES].take<float>(BACK_KEYS * BACK_QUERIES);
    auto* shares = room[SHARES].take<cell>(BACK_KEYS * LINE);
    auto* left = room[LEFT].take<cell>(BACK_KEYS * LINE);
    auto* right = room[RIGHT].take<cell>(BACK_KEYS / P * BACK_QUERIES);
    auto* out = room[OUT].take<float>(dim * BACK_QUERIES);
    auto& line = *room[LINES].take<Turned>(1);
    const Change<T> change{scores, changes, reinterpret_cast<T*>(shares), reinterpret_cast<T*>(left), right};
    std::fill_n(dk, keys * dim, 0.0f);
    std::fill_n(dv, keys * width, 0.0f);
    for (int64_t head = u.head * group; head < (u.head + 1) * group; head++)
        for (int64_t query = u.query; query < u.end; query += BACK_QUERIES) {
            const int64_t n = std::min(BACK_QUERIES, u.end - query), lanes = up(n, LANES), token = u.first + query;
            const int64_t at = (token * c.heads + head) * c.v_dim, step = c.heads * c.v_dim;
            const T *grad = static_cast<const T*>(c.grad) + at, *y = static_cast<const T*>(c.y) + at;
            const T* q = static_cast<const T*>(c.q) + token * c.q_token + head * c.q_head;
            gather(q, c.q_token, n, c.dim, raw, cells, lanes);
            turn(raw, lanes, cells, cells, q_turned, lanes);
            pair<T>(raw, lanes, cells, q_right);
            gather(grad, step, n, c.v_dim, raw, v_cells, lanes);
            turn(raw, lanes, v_cells, v_cells, g_turned, lanes);
            pair<T>(raw, lanes, v_cells, g_right);
            std::fill_n(line.lse, BACK_QUERIES, INFINITY);  // queries beyond the end have zero probabilities
            std::fill_n(line.delta, BACK_QUERIES, 0.0f);
            for (int64_t i = 0; i < n; i++) {
                line.lse[i] = c.lse[head * c.tokens + token + i];
                line.delta[i] = c.delta[head * c.tokens + token + i] = dot(grad + i * step, y + i * step, c.v_dim);
            }
            std::fill_n(out, dim * lanes, 0.0f);
            const int64_t last = up(query + n - u.key, LANES);
            for (int64_t key = down(oldest(c, query) - u.key, LANES); key < last; key += BACK_KEYS) {
                const int64_t rows = std::min(BACK_KEYS, last - key);
                const int64_t from = down(std::max<int64_t>(0, key + u.key - query), LANES), some = lanes - from;
                product<T>({k_left + key * cells, cells}, {q_turned + from, lanes},
                           {scores + from, BACK_QUERIES, false}, rows, some, cells);
                product<T>({v_left + key * v_cells, v_cells}, {g_turned + from, lanes},
                           {changes + from, BACK_QUERIES, false}, rows, some, v_cells);
                change(c, scale, line, rows, query - u.key - key, from, lanes);
                product<T>({shares + from / P, LINE}, {g_right + from / P * width, width},
                           {dv + key * width, width, true}, rows, width, some / P);
                product<T>({left + from / P, LINE}, {q_right + from / P * dim, dim}, {dk + key * dim, dim, true},
                           rows, dim, some / P);
                product<T>({k_turned + key / P, keys / P}, {right + from, BACK_QUERIES}, {out + from, lanes, true},
                           dim, some, rows / P);
            }
            turn(reinterpret_cast<cell*>(out), dim, lanes, lanes, raw, dim);
            scatter(reinterpret_cast<float*>(raw), dim, n, c.dim, c.scale,
                    static_cast<T*>(c.dq) + (token * c.heads + head) * c.dim, c.heads * c.dim);
        }
}

// Gradients of the keys of a unit, mostly those of its queries: the sum over the following units, which attend to them.
template <typename T>
void gathered(const Call& c, const Unit* u, const float* sums, int64_t dim, int64_t width) {
    for (int64_t key = u->own; key < u->end; key++) {
        float* total = room[RAW].take<float>(dim + width);
        std::fill_n(total, dim + width, 0.0f);
        for (const Unit* part = u; part < u + u->parts && part->key <= key; part++) {
            const float *dk = sums + part->room + (key - part->key) * dim;
            const float *dv = sums + part->room + part->keys() * dim + (key - part->key) * width;
            for (int64_t i = 0; i < dim; i++) total[i] += dk[i];
            for (int64_t i = 0; i < width; i++) total[dim + i] += dv[i];
        }
        const int64_t at = (u->start + key) * c.kv_heads + u->head;
        scatter(total, dim, 1, c.dim, c.scale, static_cast<T*>(c.dk) + at * c.dim, c.dim);
        scatter(total + dim, width, 1, c.v_dim, 1, static_cast<T*>(c.dv) + at * c.v_dim, c.v_dim);
    }
}

// A unit writes the gradients of its keys if no other unit attends to them, else partial sums to separate memory.
template <typename T>
void backward_or_part(const Call& c, const Unit& u, float* sums, int64_t dim, int64_t width) {
    float* dk = u.alone ? room[DK].take<float>(u.keys() * dim) : sums + u.room;
    float* dv = u.alone ? room[DV].take<float>(u.keys() * width) : dk + u.keys() * dim;
    backward<T>(c, u, dk, dv);
    if (!u.alone) return;
    const int64_t at = (u.start + u.key) * c.kv_heads + u.head, count = u.end - u.key;
    scatter(dk, dim, count, c.dim, c.scale, static_cast<T*>(c.dk) + at * c.dim, c.kv_heads * c.dim);
    scatter(dv, width, count, c.v_dim, 1, static_cast<T*>(c.dv) + at * c.v_dim, c.kv_heads * c.v_dim);
}

template <typename T>
bool run(const Call& c) {
    if (!fits(c)) return false;
    const auto all = units(c);
    const auto by = order(all);
#pragma omp parallel for schedule(dynamic) num_threads(c.threads) if (all.size() > 1)
    for (size_t i = 0; i < by.size(); i++) forward<T>(c, all[by[i]]);
    return true;
}

template <typename T>
bool run_back(const Call& c) {
    if (!fits(c)) return false;
    auto all = units(c);
    const auto by = order(all);
    const int64_t dim = up(c.dim, LANES * PER<T>), width = up(c.v_dim, LANES * PER<T>);
    int64_t size = 0;
    for (auto& u : all) {
        u.room = size;
        if (!u.alone) size += u.keys() * (dim + width);
    }
    const std::unique_ptr<float[]> sums(new float[size]);
#pragma omp parallel for schedule(dynamic) num_threads(c.threads) if (all.size() > 1)
    for (size_t i = 0; i < by.size(); i++) backward_or_part<T>(c, all[by[i]], sums.get(), dim, width);
    if (size == 0) return true;
#pragma omp parallel for schedule(dynamic) num_threads(c.threads) if (all.size() > 1)
    for (size_t i = 0; i < all.size(); i++)
        if (!all[i].alone) gathered<T>(c, &all[i], sums.get(), dim, width);
    return true;
}

}  // namespace

extern "C" {
int able() { return 1; }
// Return 0, and do nothing, if the documents do not fit.
int forward_bf16(const Call* c) { return run<bf16>(*c); }
int forward_fp32(const Call* c) { return run<float>(*c); }
int backward_bf16(const Call* c) { return run_back<bf16>(*c); }
int backward_fp32(const Call* c) { return run_back<float>(*c); }
}

#else

extern "C" int able() { return 0; }

#endif

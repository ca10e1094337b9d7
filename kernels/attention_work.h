// Work units of attention.cpp: one key head and a range of the queries of one document, for all query heads that share
// the key head. Units depend only on the lengths of documents, so that results do not depend on the number of threads.
//
// Included after `Args` and attention_tiles.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

struct WorkUnit {
    int64_t first_key;                // of the document, among all keys; `query*` and `key*` are relative to it
    int64_t first_query;              // query of the first key, among all queries; may not exist
    int64_t query_begin, query_end;   // range of queries
    int64_t key_begin;                // first key that any of them attends to
    int64_t grad_key_begin;           // first key whose partial gradients this unit sums up
    int64_t kv_head;
    int64_t num_following;            // units of this document and head from this one on
    bool owns_keys;                   // no other unit has gradients of these keys
    int64_t partial_offset;           // of the partial gradients otherwise
    double cost;

    int64_t num_keys() const { return query_end - key_begin; }
    int64_t padded_keys() const { return round_up(num_keys(), LANES); }
};

int64_t first_visible_key(const Args& args, int64_t query) { return std::max<int64_t>(0, query - args.window + 1); }

// A document, or a chunk of one. The first `num_prefix_keys` keys have no queries.
struct Segment {
    int64_t first_key, first_query, num_keys, num_prefix_keys;

    double count_pairs(int64_t window) const {
        const int64_t num_queries = num_keys - num_prefix_keys;
        return 0.5 * num_queries * std::min(num_queries + 2 * num_prefix_keys, 2 * window);
    }
};

// Whether the documents fill queries and keys, in order, and none of them has more queries than keys.
bool are_documents_valid(const Args& args) {
    const int64_t *q = args.offsets, *k = args.key_offsets, last = args.documents;
    for (int64_t d = 0; d < last; d++) {
        const bool are_queries_valid = 0 <= q[d] && q[d] <= q[d + 1] && q[d + 1] <= args.tokens;
        const bool are_keys_valid = 0 <= k[d] && k[d] <= k[d + 1] && k[d + 1] <= args.keys;
        if (!are_queries_valid || !are_keys_valid || q[d + 1] - q[d] > k[d + 1] - k[d]) return false;
    }
    return q[0] == 0 && k[0] == 0 && q[last] == args.tokens && k[last] == args.keys;
}

std::vector<Segment> list_segments(const Args& args) {
    std::vector<Segment> segments;
    for (int64_t d = 0; d < args.documents; d++) {
        const int64_t first_key = args.key_offsets[d], num_keys = args.key_offsets[d + 1] - first_key;
        const int64_t num_prefix_keys = num_keys - (args.offsets[d + 1] - args.offsets[d]);
        const int64_t first_query = args.offsets[d] - num_prefix_keys;
        for (int64_t i = round_down(num_prefix_keys, args.chunk); i < num_keys; i += args.chunk)
            segments.push_back({first_key + i, first_query + i, std::min(args.chunk, num_keys - i),
                                std::max<int64_t>(0, num_prefix_keys - i)});
    }
    return segments;
}

// Appends the units of a segment and a key head, which cost about `max_cost` each.
void split_segment(const Args& args, const Segment& segment, int64_t kv_head, double max_cost,
                   std::vector<WorkUnit>& units) {
    const size_t before = units.size();
    const int64_t begin = segment.num_prefix_keys;
    for (int64_t query = begin, end = query; query < segment.num_keys; query = end) {
        double cost = 0;
        for (; end < segment.num_keys && cost < max_cost; end = std::min(end + BWD_QUERY_BLOCK, segment.num_keys))
            cost += 1.0 * BWD_QUERY_BLOCK * (end + BWD_QUERY_BLOCK / 2 - first_visible_key(args, end));
        const int64_t key = first_visible_key(args, query), grad_key = query == begin ? key : query;
        units.push_back(
            {segment.first_key, segment.first_query, query, end, key, grad_key, kv_head, 0, false, 0, cost});
    }
    for (size_t i = before; i < units.size(); i++) {
        units[i].num_following = units.size() - i;
        units[i].owns_keys = units.size() - before == 1;
    }
}

std::vector<WorkUnit> split_work(const Args& args) {
    const auto segments = list_segments(args);
    double total = 0;
    for (const Segment& segment : segments) total += segment.count_pairs(args.window);
    const double max_cost = std::max(total * args.kv_heads / MIN_UNITS, 1.0 * BWD_QUERY_BLOCK * BWD_QUERY_BLOCK);
    std::vector<WorkUnit> units;
    for (const Segment& segment : segments)
        for (int64_t kv_head = 0; kv_head < args.kv_heads; kv_head++)
            split_segment(args, segment, kv_head, max_cost, units);
    return units;
}

// Indices of units by descending cost, for load balance.
std::vector<int64_t> sort_by_cost(const std::vector<WorkUnit>& units) {
    std::vector<int64_t> indices(units.size());
    std::iota(indices.begin(), indices.end(), 0);
    const auto is_costlier = [&](int64_t a, int64_t b) { return units[a].cost > units[b].cost; };
    std::stable_sort(indices.begin(), indices.end(), is_costlier);
    return indices;
}

}  // namespace

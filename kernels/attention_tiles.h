// Building blocks of attention.cpp: vector math, layouts, and matmuls of tiles in the cache.
//
// Matmuls use packs of 32 bits: one fp32 value, or two bf16 values that are adjacent in the reduced dimension (the VNNI
// layout). The left-hand side is (rows, packs), the right-hand side (packs, columns).

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

using bf16 = uint16_t;
using pack_t = uint32_t;
constexpr int64_t LANES = 16;     // packs in a register
constexpr int64_t TILE_ROWS = 4;  // of the tile in registers, with up to 4 registers of columns
constexpr int64_t QUERY_BLOCK = 32, KEY_BLOCK = 256;  // of the forward pass
constexpr int64_t BWD_QUERY_BLOCK = 64, BWD_KEY_BLOCK = 64;
constexpr int64_t MIN_UNITS = 16;  // units of work, if documents are long enough
constexpr float LOG2E = 1.44269504088896341f;

template <typename T>
constexpr int64_t PACK = sizeof(pack_t) / sizeof(T);  // values in a pack

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
int64_t round_down(int64_t n, int64_t step) { return n / step * step; }

// Reusable memory of a thread: new memory would cost page faults.
class ScratchBuffer {
  public:
    template <typename T>
    T* get(int64_t count) {
        const size_t bytes = round_up(std::max<int64_t>(count, 1) * sizeof(T), 64);
        if (bytes > size) {
            memory.reset(std::aligned_alloc(64, bytes));
            size = bytes;
        }
        return static_cast<T*>(memory.get());
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory;
    size_t size = 0;
};

enum { STAGING, K_LHS, K_RHS, K_TRANSPOSED, V_LHS, V_RHS, Q_LHS, Q_TRANSPOSED, Q_RHS, GRAD_TRANSPOSED, GRAD_RHS, SCORES,
       PROBS, GRAD_PROBS, GRAD_SCORES_LHS, GRAD_SCORES_RHS, OUTPUT, QUERY_STATS, DK, DV, NUM_SCRATCH };
thread_local ScratchBuffer scratch[NUM_SCRATCH];

// ---- Vector math ----

inline __m512 load_fp32(const float* x) { return _mm512_loadu_ps(x); }
inline __m512 load_fp32(const bf16* x) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store(float* target, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(target, mask, x); }
inline void store(bf16* target, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(target, mask, to_bf16(x)); }
inline __mmask16 tail_mask(int64_t count) { return count >= LANES ? 0xffff : (1u << count) - 1; }

// 2^x for x <= 0 or slightly above; 0 for NaN, and below the smallest normal number: an underflow of scalef takes more
// than a hundred cycles.
inline __m512 exp2(__m512 x) {
    const __m512 lowest = _mm512_set1_ps(-126.0f);
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ);
    x = _mm512_max_ps(x, lowest);
    const __m512 integer = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, integer);
    __m512 y = _mm512_set1_ps(1.52527338e-5f);  // ln(2)^n / n!, from n = 7 down
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.54035304e-4f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.33335581e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93147181e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(is_normal, y, integer);
}

// tanh: continued fraction with five terms up to 1, exponential function above.
inline __m512 tanh(__m512 x) {
    const __m512 ones = _mm512_set1_ps(1.0f), magnitude = _mm512_min_ps(_mm512_abs_ps(x), _mm512_set1_ps(10.0f));
    const __m512 square = _mm512_mul_ps(magnitude, magnitude);
    __m512 numerator = _mm512_fmadd_ps(square, _mm512_add_ps(square, _mm512_set1_ps(105.0f)), _mm512_set1_ps(945.0f));
    __m512 denominator = _mm512_fmadd_ps(_mm512_set1_ps(15.0f), square, _mm512_set1_ps(420.0f));
    denominator = _mm512_fmadd_ps(square, denominator, _mm512_set1_ps(945.0f));
    const __m512 small_result = _mm512_div_ps(_mm512_mul_ps(magnitude, numerator), denominator);
    const __m512 inverse = exp2(_mm512_mul_ps(magnitude, _mm512_set1_ps(-2 * LOG2E)));
    const __m512 large_result = _mm512_div_ps(_mm512_sub_ps(ones, inverse), _mm512_add_ps(ones, inverse));
    const __m512 y = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(magnitude, ones, _CMP_GT_OQ), small_result, large_result);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_castps_si512(y), _mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff), 0xE4));  // the sign of x
}

// Score of a dot product, times log2(e), and the derivative of the softcap.
struct ScoreTransform {
    float scale, softcap, scale_over_softcap;
    explicit ScoreTransform(const Args& args)
        : scale(args.scale * LOG2E), softcap(args.softcap * LOG2E), scale_over_softcap(args.scale / args.softcap) {}
    __m512 score(__m512 s) const {
        if (softcap == 0) return _mm512_mul_ps(s, _mm512_set1_ps(scale));
        return _mm512_mul_ps(tanh(_mm512_mul_ps(s, _mm512_set1_ps(scale_over_softcap))), _mm512_set1_ps(softcap));
    }
    __m512 softcap_derivative(__m512 score) const {
        const __m512 t = _mm512_div_ps(score, _mm512_set1_ps(softcap));
        return _mm512_fnmadd_ps(t, t, _mm512_set1_ps(1.0f));
    }
};

// ---- Layouts ----

// Copies strided rows of `width` values to rows of packs, padded with zeros to `padded_count` rows.
template <typename T>
void copy_rows(const T* source, int64_t stride, int64_t count, int64_t width, pack_t* target, int64_t packs,
               int64_t padded_count) {
    const size_t bytes = width * sizeof(T), row_bytes = packs * sizeof(pack_t);
    for (int64_t r = 0; r < count; r++, source += stride) {
        auto* row = reinterpret_cast<char*>(target + r * packs);
        std::memcpy(row, source, bytes);
        std::memset(row + bytes, 0, row_bytes - bytes);
    }
    std::memset(target + count * packs, 0, (padded_count - count) * row_bytes);
}

// Transposes (rows, columns) to (columns, rows); both are multiples of the register width.
void transpose(const pack_t* source, int64_t rows, int64_t columns, int64_t stride, pack_t* target,
               int64_t target_stride) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            __m512i a[LANES], b[LANES];
            for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(source + (r + i) * stride + c);
            for (int i = 0; i < LANES; i += 2) {
                b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
            }
            for (int i = 0; i < LANES; i += 4)
                for (int j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
                    a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
                }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) {
                    b[8 * j + i] = _mm512_shuffle_i32x4(a[8 * j + i], a[8 * j + i + 4], 0x88);
                    b[8 * j + i + 4] = _mm512_shuffle_i32x4(a[8 * j + i], a[8 * j + i + 4], 0xdd);
                }
            for (int i = 0; i < 8; i++) {
                const int64_t row = c + i % 4 + i / 4 * 4;
                _mm512_storeu_si512(target + row * target_stride + r, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
                _mm512_storeu_si512(target + (row + 8) * target_stride + r, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
            }
        }
}

// Interleaves two rows of values to one row of packs.
inline __m512i interleave(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// From (rows, packs) to the right-hand side of a matmul over the rows: (rows / PACK, columns).
template <typename T>
void pack_row_pairs(const pack_t* source, int64_t rows, int64_t packs, pack_t* target) {
    if (PACK<T> == 1) {
        std::memcpy(target, source, rows * packs * sizeof(pack_t));
        return;
    }
    const int64_t width = 2 * packs;
    for (int64_t r = 0; r < rows; r += 2) {
        const auto* even = reinterpret_cast<const bf16*>(source + r * packs);
        for (int64_t c = 0; c < width; c += LANES) {
            const auto *first = (const __m256i*)(even + c), *second = (const __m256i*)(even + width + c);
            const __m512i x = interleave(_mm256_loadu_si256(first), _mm256_loadu_si256(second));
            _mm512_storeu_si512(target + r / 2 * width + c, x);
        }
    }
}

// From transposed (packs, rows) to the left-hand side of a matmul over the rows: (columns, rows / PACK).
template <typename T>
void pack_column_pairs(const pack_t* transposed, int64_t packs, int64_t rows, pack_t* target) {
    if (PACK<T> == 1) {
        std::memcpy(target, transposed, rows * packs * sizeof(pack_t));
        return;
    }
    for (int64_t c = 0; c < packs; c++)
        for (int64_t r = 0; r < rows; r += LANES) {
            const __m512i x = _mm512_loadu_si512(transposed + c * rows + r);
            auto* even = target + c * rows + r / 2;
            _mm256_storeu_si256((__m256i*)even, _mm512_cvtepi32_epi16(x));
            _mm256_storeu_si256((__m256i*)(even + rows / 2), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
        }
}

// ---- Matmuls ----

inline __m512 multiply_add(__m512 sum, pack_t a, __m512i b, bf16) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
inline __m512 multiply_add(__m512 sum, pack_t a, __m512i b, float) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a)), _mm512_castsi512_ps(b), sum);
}

struct Lhs {
    const pack_t* data;
    int64_t stride;
};
struct Rhs {
    const pack_t* data;
    int64_t stride;
};
struct Accumulator {
    float* data;
    int64_t stride;
    bool accumulate;
};

template <typename T, int N>
void multiply_tile(Lhs a, Rhs b, Accumulator c, int64_t packs) {
    __m512 sum[TILE_ROWS][N];
#pragma GCC unroll 4
    for (int m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            sum[m][n] = c.accumulate ? _mm512_loadu_ps(c.data + m * c.stride + n * LANES) : _mm512_setzero_ps();
    for (int64_t i = 0; i < packs; i++) {
        __m512i rhs[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) rhs[n] = _mm512_loadu_si512(b.data + i * b.stride + n * LANES);
#pragma GCC unroll 4
        for (int m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[m][n] = multiply_add(sum[m][n], a.data[m * a.stride + i], rhs[n], T());
    }
#pragma GCC unroll 4
    for (int m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) _mm512_storeu_ps(c.data + m * c.stride + n * LANES, sum[m][n]);
}

// c = a b, or c += a b. Rows are a multiple of TILE_ROWS, columns of LANES.
template <typename T>
void matmul(Lhs a, Rhs b, Accumulator c, int64_t rows, int64_t columns, int64_t packs) {
    for (int64_t n = 0; n < columns; n += 4 * LANES) {
        const int64_t registers = std::min<int64_t>(4, (columns - n) / LANES);
        for (int64_t m = 0; m < rows; m += TILE_ROWS) {
            const Lhs lhs{a.data + m * a.stride, a.stride};
            const Rhs rhs{b.data + n, b.stride};
            const Accumulator sum{c.data + m * c.stride + n, c.stride, c.accumulate};
            switch (registers) {
                case 4: multiply_tile<T, 4>(lhs, rhs, sum, packs); break;
                case 3: multiply_tile<T, 3>(lhs, rhs, sum, packs); break;
                case 2: multiply_tile<T, 2>(lhs, rhs, sum, packs); break;
                default: multiply_tile<T, 1>(lhs, rhs, sum, packs);
            }
        }
    }
}

}  // namespace

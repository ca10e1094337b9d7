// Building blocks of attention.cpp: vector math, layouts, and matmuls of tiles in the cache.
//
// Matmuls use cells of 32 bits, two bf16 values or one fp32 value: the left side is (rows, cells), the right side
// (cells, columns), with the two values of a cell adjacent in the reduced dimension.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>


namespace {

using bf16 = uint16_t;
using cell = uint32_t;
constexpr int64_t LANES = 16;                      // cells in a register
constexpr int64_t ROWS = 4;                        // of a tile in registers, with 4 registers of columns
constexpr int64_t QUERIES = 32, KEYS = 256;        // block sizes of the forward pass
constexpr int64_t BACK_QUERIES = 64, BACK_KEYS = 64;
constexpr int64_t UNITS = 16;                      // minimum number of units, if documents are long enough
constexpr float LOG2E = 1.44269504088896341f;

template <typename T>
constexpr int64_t PER = sizeof(cell) / sizeof(T);  // values in a cell

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
int64_t down(int64_t n, int64_t step) { return n / step * step; }

// Reusable memory of a thread: new memory would cost page faults.
class Room {
  public:
    template <typename T>
    T* take(int64_t count) {
        const size_t bytes = up(std::max<int64_t>(count, 1) * sizeof(T), 64);
        if (bytes > size) {
            place.reset(std::aligned_alloc(64, bytes));
            size = bytes;
        }
        return static_cast<T*>(place.get());
    }

  private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> place;
    size_t size = 0;
};

enum { RAW, K_LEFT, K_RIGHT, K_TURNED, V_LEFT, V_RIGHT, Q_LEFT, Q_TURNED, Q_RIGHT, G_TURNED, G_RIGHT, SCORES, SHARES,
       CHANGES, LEFT, RIGHT, OUT, LINES, DK, DV, ROOMS };
thread_local Room room[ROOMS];

// ---- Vector math ----

inline __m512 wide(const float* x) { return _mm512_loadu_ps(x); }
inline __m512 wide(const bf16* x) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store(float* to, __m512 x, __mmask16 some) { _mm512_mask_storeu_ps(to, some, x); }
inline void store(bf16* to, __m512 x, __mmask16 some) { _mm256_mask_storeu_epi16(to, some, narrow(x)); }
inline __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : (1u << count) - 1; }

// 2^x for x <= 0 or slightly above; 0 for NaN and below 2^-126, the smallest normal number. An underflow of scalef would
// take more than a hundred cycles.
inline __m512 exp2(__m512 x) {
    const __m512 lowest = _mm512_set1_ps(-126.0f);
    const __mmask16 is_normal = _mm512_cmp_ps_mask(x, lowest, _CMP_GE_OQ);
    x = _mm512_max_ps(x, lowest);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.52527338e-5f);  // ln(2)^n / n!, from n = 7 down
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.54035304e-4f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.33335581e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93147181e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(is_normal, y, whole);
}

// tanh: continued fraction with five terms up to 1, exponential function above.
inline __m512 tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_min_ps(_mm512_abs_ps(x), _mm512_set1_ps(10.0f));
    const __m512 square = _mm512_mul_ps(size, size);
    __m512 top = _mm512_fmadd_ps(square, _mm512_add_ps(square, _mm512_set1_ps(105.0f)), _mm512_set1_ps(945.0f));
    __m512 low = _mm512_fmadd_ps(_mm512_set1_ps(15.0f), square, _mm512_set1_ps(420.0f));
    low = _mm512_fmadd_ps(square, low, _mm512_set1_ps(945.0f));
    const __m512 near = _mm512_div_ps(_mm512_mul_ps(size, top), low);
    const __m512 inverse = exp2(_mm512_mul_ps(size, _mm512_set1_ps(-2 * LOG2E)));
    const __m512 far = _mm512_div_ps(_mm512_sub_ps(one, inverse), _mm512_add_ps(one, inverse));
    const __m512 y = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(size, one, _CMP_GT_OQ), near, far);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_castps_si512(y), _mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff), 0xE4));  // the sign of x
}

// Transform of a dot product: score times log2(e), and derivative of the softcap.
struct Scale {
    float plain, cap, inner;
    explicit Scale(const Call& c) : plain(c.scale * LOG2E), cap(c.softcap * LOG2E), inner(c.scale / c.softcap) {}
    __m512 score(__m512 s) const {
        if (cap == 0) return _mm512_mul_ps(s, _mm512_set1_ps(plain));
        return _mm512_mul_ps(tanh(_mm512_mul_ps(s, _mm512_set1_ps(inner))), _mm512_set1_ps(cap));
    }
    __m512 slope(__m512 score) const {
        const __m512 t = _mm512_div_ps(score, _mm512_set1_ps(cap));
        return _mm512_fnmadd_ps(t, t, _mm512_set1_ps(1.0f));
    }
};

// ---- Layouts ----

// Copies strided rows to rows of cells, padded with zeros to complete cells and to `total` rows.
template <typename T>
void gather(const T* from, int64_t stride, int64_t count, int64_t width, cell* to, int64_t cells, int64_t total) {
    const size_t bytes = width * sizeof(T), all = cells * sizeof(cell);
    for (int64_t r = 0; r < count; r++, from += stride) {
        auto* row = reinterpret_cast<char*>(to + r * cells);
        std::memcpy(row, from, bytes);
        std::memset(row + bytes, 0, all - bytes);
    }
    std::memset(to + count * cells, 0, (total - count) * all);
}

// Transposes (rows, columns) to (columns, rows); both are multiples of the register width.
void turn(const cell* from, int64_t rows, int64_t columns, int64_t stride, cell* to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            __m512i a[LANES], b[LANES];
            for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(from + (r + i) * stride + c);
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
                const int64_t at = c + i % 4 + i / 4 * 4;
                _mm512_storeu_si512(to + at * to_stride + r, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
                _mm512_storeu_si512(to + (at + 8) * to_stride + r, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
            }
        }
}

// Interleaves two rows of values to one row of cells.
inline __m512i mixed(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// (rows, cells) to the right side of a matmul over the rows: (rows / PER, columns).
template <typename T>
void pair(const cell* from, int64_t rows, int64_t cells, cell* to) {
    if (PER<T> == 1) {
        std::memcpy(to, from, rows * cells * sizeof(cell));
        return;
    }
    const int64_t width = 2 * cells;
    for (int64_t r = 0; r < rows; r += 2) {
        const auto* even = reinterpret_cast<const bf16*>(from + r * cells);
        for (int64_t c = 0; c < width; c += LANES) {
            const auto* at = (const __m256i*)(even + c);
            const __m512i x = mixed(_mm256_loadu_si256(at), _mm256_loadu_si256((const __m256i*)(even + width + c)));
            _mm512_storeu_si512(to + r / 2 * width + c, x);
        }
    }
}

// Transposed (cells, rows) to the left side of a matmul over the rows: (columns, rows / PER).
template <typename T>
void split(const cell* turned, int64_t cells, int64_t rows, cell* to) {
    if (PER<T> == 1) {
        std::memcpy(to, turned, rows * cells * sizeof(cell));
        return;
    }
    for (int64_t c = 0; c < cells; c++)
        for (int64_t r = 0; r < rows; r += LANES) {
            const __m512i x = _mm512_loadu_si512(turned + c * rows + r);
            auto* at = to + c * rows + r / 2;
            _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(x));
            _mm256_storeu_si256((__m256i*)(at + rows / 2), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
        }
}

// ---- Matmuls ----

inline __m512 mac(__m512 sum, cell a, __m512i b, bf16) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
inline __m512 mac(__m512 sum, cell a, __m512i b, float) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(a)), _mm512_castsi512_ps(b), sum);
}

struct Left {
    const cell* at;
    int64_t stride;
};
struct Right {
    const cell* at;
    int64_t stride;
};
struct Sum {
    float* at;
    int64_t stride;
    bool add;
};

template <typename T, int N>
void tile(Left a, Right b, Sum c, int64_t cells) {
    __m512 sum[ROWS][N];
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
            sum[m][n] = c.add ? _mm512_loadu_ps(c.at + m * c.stride + n * LANES) : _mm512_setzero_ps();
    for (int64_t i = 0; i < cells; i++) {
        __m512i right[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) right[n] = _mm512_loadu_si512(b.at + i * b.stride + n * LANES);
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[m][n] = mac(sum[m][n], a.at[m * a.stride + i], right[n], T());
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) _mm512_storeu_ps(c.at + m * c.stride + n * LANES, sum[m][n]);
}

// c = a b, or c += a b. Rows are a multiple of ROWS, columns of LANES.
template <typename T>
void product(Left a, Right b, Sum c, int64_t rows, int64_t columns, int64_t cells) {
    for (int64_t n = 0; n < columns; n += 4 * LANES) {
        const int64_t wide = std::min<int64_t>(4, (columns - n) / LANES);
        for (int64_t m = 0; m < rows; m += ROWS) {
            const Left left{a.at + m * a.stride, a.stride};
            const Right right{b.at + n, b.stride};
            const Sum sum{c.at + m * c.stride + n, c.stride, c.add};
            switch (wide) {
                case 4: tile<T, 4>(left, right, sum, cells); break;
                case 3: tile<T, 3>(left, right, sum, cells); break;
                case 2: tile<T, 2>(left, right, sum, cells); break;
                default: tile<T, 1>(left, right, sum, cells);
            }
        }
    }
}

}  // namespace

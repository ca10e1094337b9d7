// Matmul of few rows with a bf16 matrix, limited by memory bandwidth; a general matmul takes twice as long.

#include "bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;
constexpr int MAX_DOT_ROWS = 8;            // of x, without AMX

// Dot products of M rows of x with one row of the weight, accumulated in fp32.
template <int M>
AVX512_BF16 void compute_dots(const bf16* x, const bf16* weight, float* products, int64_t width) {
    __m512 sums[M];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        const auto w = (__m512bh)_mm512_loadu_si512(weight + i);
        for (int m = 0; m < M; m++)
            sums[m] = _mm512_dpbf16_ps(sums[m], w, (__m512bh)_mm512_loadu_si512(x + m * width + i));
    }
    if (i < width) {
        const __mmask32 tail_mask = (1u << (width - i)) - 1;
        const auto w = (__m512bh)_mm512_maskz_loadu_epi16(tail_mask, weight + i);
        for (int m = 0; m < M; m++) {
            const auto x_tail = (__m512bh)_mm512_maskz_loadu_epi16(tail_mask, x + m * width + i);
            sums[m] = _mm512_dpbf16_ps(sums[m], w, x_tail);
        }
    }
    for (int m = 0; m < M; m++) products[m] = _mm512_reduce_add_ps(sums[m]);
}

using DotProductKernel = void (*)(const bf16*, const bf16*, float*, int64_t);
constexpr DotProductKernel DOT_PRODUCT_KERNELS[MAX_DOT_ROWS] = {
    compute_dots<1>, compute_dots<2>, compute_dots<3>, compute_dots<4>,
    compute_dots<5>, compute_dots<6>, compute_dots<7>, compute_dots<8>};

// The output rows [begin, end) of y = x W^T + b, at most MAX_DOT_ROWS rows of x at a time.
void multiply_rows(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t rows,
                   int64_t width, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
        for (int64_t first = 0; first < tokens; first += MAX_DOT_ROWS) {
            const int64_t count = std::min<int64_t>(MAX_DOT_ROWS, tokens - first);
            float products[MAX_DOT_ROWS];
            DOT_PRODUCT_KERNELS[count - 1](x + first * width, weight + r * stride, products, width);
            for (int64_t m = 0; m < count; m++)
                store_rounded(bias == nullptr ? products[m] : products[m] + to_float(bias[r]),
                              y[(first + m) * rows + r]);
        }
}

#if __GNUC__ >= 11 || __clang_major__ >= 12
#define AMX __attribute__((target("amx-tile,amx-bf16")))

// The weight is the left-hand side of a tile product, as it is in memory: 16 of its rows by 32 columns. The rows of x
// are the columns of the right-hand side, in the VNNI layout: pairs of values of a column are adjacent.
constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 32, MAX_TILE_TOKENS = 16;
constexpr int64_t TILE_PACKS = TILE_ROWS * MAX_TILE_TOKENS;  // of two bf16 values
constexpr int64_t LINE_BYTES = 64;                           // of a cache line

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// Requests the permission to use tile registers, which Linux grants to a process.
bool request_amx() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// The right-hand sides of all tile products: TILE_PACKS for each 32 columns of x.
void pack_rows(const bf16* x, int64_t tokens, int64_t width, uint32_t* packed) {
    for (int64_t m = 0; m < tokens; m++)
        for (int64_t i = 0; i < width / 2; i++)
            std::memcpy(packed + i * MAX_TILE_TOKENS + m, x + m * width + 2 * i, sizeof(uint32_t));
}

void write_tile(const float* sums, const bf16* bias, bf16* y, int64_t tokens, int64_t rows) {
    for (int64_t m = 0; m < tokens; m++)
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            const float sum = sums[r * MAX_TILE_TOKENS + m];
            store_rounded(bias == nullptr ? sum : sum + to_float(bias[r]), y[m * rows + r]);
        }
}

// The output rows [begin, end), a multiple of 32, of at most 16 rows of x. The weight of the next 32 is prefetched.
AMX void multiply_tiles(const uint32_t* packed, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens,
                        int64_t rows, int64_t width, int64_t stride, int64_t begin, int64_t end) {
    constexpr int64_t BLOCK_LINES = 2 * TILE_ROWS * TILE_COLUMNS * sizeof(bf16) / LINE_BYTES;
    alignas(64) float sums[TILE_PACKS];
    for (int64_t r = begin; r < end; r += 2 * TILE_ROWS) {
        const bf16 *first = weight + r * stride, *second = first + TILE_ROWS * stride;
        const char* next = reinterpret_cast<const char*>(second + TILE_ROWS * stride);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < width; i += TILE_COLUMNS, next += BLOCK_LINES * LINE_BYTES) {
            for (int64_t line = 0; line < BLOCK_LINES; line++) _mm_prefetch(next + line * LINE_BYTES, _MM_HINT_T1);
            _tile_loadd(2, packed + i / 2 * MAX_TILE_TOKENS, MAX_TILE_TOKENS * sizeof(uint32_t));
            _tile_loadd(3, first + i, stride * sizeof(bf16));
            _tile_dpbf16ps(0, 3, 2);
            _tile_loadd(4, second + i, stride * sizeof(bf16));
            _tile_dpbf16ps(1, 4, 2);
        }
        _tile_stored(0, sums, MAX_TILE_TOKENS * sizeof(float));
        write_tile(sums, bias == nullptr ? nullptr : bias + r, y + r, tokens, rows);
        _tile_stored(1, sums, MAX_TILE_TOKENS * sizeof(float));
        write_tile(sums, bias == nullptr ? nullptr : bias + r + TILE_ROWS, y + r + TILE_ROWS, tokens, rows);
    }
}

// Sets the shapes of the tile registers; restores those of other libraries, which may rely on them. The intrinsics of
// GCC before 12.4 declare only the first 8 bytes of the shapes as operands.
class TileShapes {
  public:
    AMX explicit TileShapes(int64_t tokens) {
        __asm__ volatile("sttilecfg %0" : "=m"(previous));
        TileConfig config;
        for (int tile = 0; tile < 5; tile++) {
            const bool is_weight = tile > 2;
            config.rows[tile] = TILE_ROWS;
            config.bytes_per_row[tile] = is_weight ? TILE_COLUMNS * sizeof(bf16) : tokens * sizeof(uint32_t);
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(config));
    }
    AMX ~TileShapes() { __asm__ volatile("ldtilecfg %0" ::"m"(previous)); }

  private:
    TileConfig previous;
};
#else
constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 32, MAX_TILE_TOKENS = 16, TILE_PACKS = 0;
struct TileShapes {
    explicit TileShapes(int64_t) {}
};
bool request_amx() { return false; }
void pack_rows(const bf16*, int64_t, int64_t, uint32_t*) {}
void multiply_tiles(const uint32_t*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t) {}
#endif

const bool has_amx = request_amx();

// All output rows by tiles, 32 at a time; the rows that are left by dot products.
void multiply_with_amx(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t rows,
                       int64_t width, int64_t stride, int threads) {
    std::vector<uint32_t> packed(width / 2 * MAX_TILE_TOKENS);
    pack_rows(x, tokens, width, packed.data());
    const int64_t blocks = rows / (2 * TILE_ROWS), tiled = blocks * 2 * TILE_ROWS;
#pragma omp parallel num_threads(threads) if (rows * width > MIN_PARALLEL_ELEMENTS)
    {
        const TileShapes shapes(tokens);
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t begin = block * 2 * TILE_ROWS;
            multiply_tiles(packed.data(), weight, bias, y, tokens, rows, width, stride, begin, begin + 2 * TILE_ROWS);
        }
    }
    multiply_rows(x, weight, bias, y, tokens, rows, width, stride, tiled, rows);
}

}  // namespace

extern "C" {

bool is_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

// Number of rows of x up to which this is faster than a general matmul. For a head of 49,152 x 576 and 8 rows, one core
// of a Xeon with AMX takes 4.8 ms (12 GB/s), and torch 11.6 ms.
int max_tokens() { return has_amx ? MAX_TILE_TOKENS : MAX_DOT_ROWS; }

// y = x W^T + b for x (tokens, width) of at most max_tokens() rows and W (rows, width) with row stride `stride`.
void gemv(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t rows, int64_t width,
          int64_t stride, int threads) {
    if (has_amx && tokens > 1 && width % TILE_COLUMNS == 0)
        return multiply_with_amx(x, weight, bias, y, tokens, rows, width, stride, threads);
#pragma omp parallel for num_threads(threads) if (rows * width > MIN_PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; r++) multiply_rows(x, weight, bias, y, tokens, rows, width, stride, r, r + 1);
}
}

#else

extern "C" {
bool is_supported() { return false; }
int max_tokens() { return 0; }
void gemv(const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t, int) {}
}

#endif

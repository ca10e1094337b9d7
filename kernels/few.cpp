// Matmul of few rows with a bf16 matrix, limited by memory bandwidth; a general matmul takes twice as long.

#include "bf16.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define PAIRS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace {

constexpr int64_t FEW = 1 << 15;  // elements per thread, at least
constexpr int MOST = 8;           // maximum rows of x

// Dot products of M rows of x with one row of the weight, accumulated in fp32.
template <int M>
PAIRS void dots(const bf16* x, const bf16* weight, float* found, int64_t width) {
    __m512 sums[M];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        const auto w = (__m512bh)_mm512_loadu_si512(weight + i);
        for (int m = 0; m < M; m++)
            sums[m] = _mm512_dpbf16_ps(sums[m], w, (__m512bh)_mm512_loadu_si512(x + m * width + i));
    }
    if (i < width) {
        const __mmask32 rest = (1u << (width - i)) - 1;
        const auto w = (__m512bh)_mm512_maskz_loadu_epi16(rest, weight + i);
        for (int m = 0; m < M; m++) {
            const auto some = (__m512bh)_mm512_maskz_loadu_epi16(rest, x + m * width + i);
            sums[m] = _mm512_dpbf16_ps(sums[m], w, some);
        }
    }
    for (int m = 0; m < M; m++) found[m] = _mm512_reduce_add_ps(sums[m]);
}

using Dots = void (*)(const bf16*, const bf16*, float*, int64_t);
constexpr Dots DOTS[MOST] = {dots<1>, dots<2>, dots<3>, dots<4>, dots<5>, dots<6>, dots<7>, dots<8>};

}  // namespace

extern "C" {

bool able() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

// Number of rows of x up to which this is faster than a general matmul. With AMX (bit 22 of edx in leaf 7): 121 instead
// of 154 us for 8 rows and 125 instead of 129 us for 4 rows of a 576 x 576 matrix, on one core of a Xeon.
int max_tokens() {
    unsigned eax, ebx, ecx, edx;
    const bool has_amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 22 & 1);
    return has_amx ? 2 : MOST;
}

// y = x W^T + b for x (tokens, width) and W (rows, width) with row stride `stride`.
void few(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int64_t tokens, int64_t rows, int64_t width,
         int64_t stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
    for (int64_t r = 0; r < rows; r++) {
        float found[MOST];
        DOTS[tokens - 1](x, weight + r * stride, found, width);
        for (int64_t m = 0; m < tokens; m++)
            round(bias == nullptr ? found[m] : found[m] + number(bias[r]), y[m * rows + r]);
    }
}
}

#else

extern "C" {
bool able() { return false; }
int max_tokens() { return 0; }
void few(const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t, int) {}
}

#endif

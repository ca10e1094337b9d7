// Gated activations a(gate) * up with a(x) = x sigmoid(s(x)), forward and backward, computed in fp32.

#include <cmath>

#include "bf16.h"

namespace {

constexpr int64_t FEW = 1 << 14;   // elements per thread, at least
constexpr int64_t PART = 1 << 12;  // elements that a thread processes at a time

// Fused multiply-add if the processor has it; otherwise std::fma would be a library call per value.
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x with an error of 2 ulp: x = n ln 2 + r, and a series for e^r. Compilers vectorize it.
inline float power(float x) {
    const bool large = x > 88.37f;
    x = large ? 88.37f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = fma(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: the low bits of the sum are the integer n
    const float n = shifted - 12582912.0f;
    const float r = fma(n, -1.42860682e-6f, fma(n, -0.693145752f, x));
    float series = fma(r, 1.0f / 5040, 1.0f / 720);
    series = fma(series, r, 1.0f / 120);
    series = fma(series, r, 1.0f / 24);
    series = fma(series, r, 1.0f / 6);
    series = fma(series, r, 0.5f);
    series = fma(series, r * r, r);
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return large ? INFINITY : fma(series, scale, scale);
}

inline float sigmoid(float x) { return 1 / (1 + power(-x)); }

// Each kind computes its value, rounded to T like its reference, and the gradients of gate and up for a unit gradient.
struct Silu {
    template <typename T>
    static float value(float gate, float up) {
        return round_to<T>(gate / (1 + power(-gate))) * up;
    }

    static void gradients(float gate, float up, float& to_gate, float& to_up) {
        const float share = sigmoid(gate);
        to_up = gate * share;
        to_gate = up * share * (1 + gate * (1 - share));
    }
};

// 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
    static constexpr float RATE = 1.5957691216f, CUBE = 0.044715f;

    template <typename T>
    static float value(float gate, float up) {
        return round_to<T>(gate / (1 + power(-RATE * (gate + CUBE * gate * gate * gate)))) * up;
    }

    static void gradients(float gate, float up, float& to_gate, float& to_up) {
        const float share = sigmoid(RATE * (gate + CUBE * gate * gate * gate));
        to_up = gate * share;
        to_gate = up * share * (1 + gate * (1 - share) * RATE * (1 + 3 * CUBE * gate * gate));
    }
};

// (up + 1) gate sigmoid(1.702 gate), both clamped to 7; clamped values have no gradient.
struct Clamped {
    static constexpr float RATE = 1.702f, END = 7;

    template <typename T>
    static float value(float gate, float up) {
        gate = gate > END ? END : gate;
        up = up > END ? END : up;
        up = up < -END ? -END : up;
        return round_to<T>(up + 1) * round_to<T>(gate * round_to<T>(sigmoid(round_to<T>(gate * RATE))));
    }

    static void gradients(float gate, float up, float& to_gate, float& to_up) {
        const float gate_in = gate <= END, up_in = std::fabs(up) <= END;
        gate = gate > END ? END : gate;
        up = up > END ? END : up;
        up = up < -END ? -END : up;
        const float share = sigmoid(RATE * gate);
        to_up = up_in * (gate * share);
        to_gate = gate_in * (up + 1) * share * (1 + RATE * gate * (1 - share));
    }
};

struct Sizes {
    int64_t rows, dim, gate_stride, up_stride, grad_stride;
    int threads;
};

// Contiguous rows are processed as one long row. Rows are processed in parts.
template <typename F>
void parts(const Sizes& s, F work) {
    const int64_t many = (s.dim + PART - 1) / PART;
#pragma omp parallel for num_threads(s.threads) if (s.rows * s.dim > FEW)
    for (int64_t i = 0; i < s.rows * many; i++) {
        const int64_t row = i / many, start = i % many * PART;
        work(row, start, s.dim - start < PART ? s.dim - start : PART);
    }
}

template <typename A, typename T>
void forward(const T* gate, const T* up, T* y, const Sizes& s) {
    parts(s, [=](int64_t row, int64_t start, int64_t size) {
        const T *g = gate + row * s.gate_stride + start, *u = up + row * s.up_stride + start;
        T* to = y + row * s.dim + start;
        for (int64_t i = 0; i < size; i++) store_rounded(A::template value<T>(to_float(g[i]), to_float(u[i])), to[i]);
    });
}

template <typename A, typename T>
void backward(const T* grad, const T* gate, const T* up, T* to_gate, T* to_up, const Sizes& s) {
    parts(s, [=](int64_t row, int64_t start, int64_t size) {
        const T *g = gate + row * s.gate_stride + start, *u = up + row * s.up_stride + start;
        const T* by = grad + row * s.grad_stride + start;
        T *a = to_gate + row * s.dim + start, *b = to_up + row * s.dim + start;
        for (int64_t i = 0; i < size; i++) {
            float of_gate, of_up;
            A::gradients(to_float(g[i]), to_float(u[i]), of_gate, of_up);
            const float unit = to_float(by[i]);
            store_rounded(unit * of_gate, a[i]);
            store_rounded(unit * of_up, b[i]);
        }
    });
}

}  // namespace

#define GLU(A, T, NAME)                                                                                              \
    void forward_##NAME(const T* gate, const T* up, T* y, const Sizes* s) { forward<A>(gate, up, y, *s); }            \
    void backward_##NAME(const T* grad, const T* gate, const T* up, T* to_gate, T* to_up, const Sizes* s) {           \
        backward<A>(grad, gate, up, to_gate, to_up, *s);                                                             \
    }

extern "C" {
GLU(Silu, float, silu_fp32)
GLU(Silu, bf16, silu_bf16)
GLU(GeluTanh, float, gelu_tanh_fp32)
GLU(GeluTanh, bf16, gelu_tanh_bf16)
GLU(Clamped, float, clamped_swiglu_fp32)
GLU(Clamped, bf16, clamped_swiglu_bf16)
}

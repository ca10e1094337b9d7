// Gated activations a(gate) * up with a(x) = x sigmoid(s(x)), forward and backward, computed in fp32.

#include <cmath>

#include "bf16.h"

namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 14;
constexpr int64_t CHUNK_SIZE = 1 << 12;  // elements that a thread processes at a time

// Fused multiply-add if the processor has it; otherwise std::fma would be a library call per value.
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// e^x with an error of 2 ulp: x = n ln 2 + r, and a Taylor polynomial for e^r. Compilers vectorize it.
inline float fast_exp(float x) {
    const bool is_overflow = x > 88.37f;
    x = is_overflow ? 88.37f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = fma(x, 1.44269504f, 12582912.0f);  // 1.5 * 2^23: the low bits of the sum are the integer n
    const float n = shifted - 12582912.0f;
    const float r = fma(n, -1.42860682e-6f, fma(n, -0.693145752f, x));
    float p = fma(r, 1.0f / 5040, 1.0f / 720);
    p = fma(p, r, 1.0f / 120);
    p = fma(p, r, 1.0f / 24);
    p = fma(p, r, 1.0f / 6);
    p = fma(p, r, 0.5f);
    p = fma(p, r * r, r);
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float power_of_two;
    std::memcpy(&power_of_two, &bits, sizeof power_of_two);
    return is_overflow ? INFINITY : fma(p, power_of_two, power_of_two);
}

inline float sigmoid(float x) { return 1 / (1 + fast_exp(-x)); }

// Each activation computes its output, rounded to T like its reference, and the gradients of gate and up for a gradient
// of 1.
struct Silu {
    template <typename T>
    static float forward(float gate, float up) {
        return round_to<T>(gate / (1 + fast_exp(-gate))) * up;
    }

    static void backward(float gate, float up, float& grad_gate, float& grad_up) {
        const float sig = sigmoid(gate);
        grad_up = gate * sig;
        grad_gate = up * sig * (1 + gate * (1 - sig));
    }
};

// 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
    static constexpr float ALPHA = 1.5957691216f;  // 2 sqrt(2 / pi)
    static constexpr float KAPPA = 0.044715f;

    template <typename T>
    static float forward(float gate, float up) {
        return round_to<T>(gate / (1 + fast_exp(-ALPHA * (gate + KAPPA * gate * gate * gate)))) * up;
    }

    static void backward(float gate, float up, float& grad_gate, float& grad_up) {
        const float sig = sigmoid(ALPHA * (gate + KAPPA * gate * gate * gate));
        grad_up = gate * sig;
        grad_gate = up * sig * (1 + gate * (1 - sig) * ALPHA * (1 + 3 * KAPPA * gate * gate));
    }
};

// (up + 1) gate sigmoid(1.702 gate), both clamped to 7; clamped values have no gradient.
struct ClampedSwiglu {
    static constexpr float ALPHA = 1.702f, LIMIT = 7;

    template <typename T>
    static float forward(float gate, float up) {
        gate = gate > LIMIT ? LIMIT : gate;
        up = up > LIMIT ? LIMIT : up;
        up = up < -LIMIT ? -LIMIT : up;
        return round_to<T>(up + 1) * round_to<T>(gate * round_to<T>(sigmoid(round_to<T>(gate * ALPHA))));
    }

    static void backward(float gate, float up, float& grad_gate, float& grad_up) {
        const float gate_mask = gate <= LIMIT, up_mask = std::fabs(up) <= LIMIT;
        gate = gate > LIMIT ? LIMIT : gate;
        up = up > LIMIT ? LIMIT : up;
        up = up < -LIMIT ? -LIMIT : up;
        const float sig = sigmoid(ALPHA * gate);
        grad_up = up_mask * (gate * sig);
        grad_gate = gate_mask * (up + 1) * sig * (1 + ALPHA * gate * (1 - sig));
    }
};

struct GluSizes {
    int64_t num_rows, dim, gate_stride, up_stride, grad_stride;
    int num_threads;
};

// Call process(row, start, size) for chunks of rows, in parallel. Contiguous tensors are one long row.
template <typename F>
void for_each_chunk(const GluSizes& s, F process) {
    const int64_t chunks_per_row = (s.dim + CHUNK_SIZE - 1) / CHUNK_SIZE;
#pragma omp parallel for num_threads(s.num_threads) if (s.num_rows * s.dim > MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < s.num_rows * chunks_per_row; i++) {
        const int64_t row = i / chunks_per_row, start = i % chunks_per_row * CHUNK_SIZE;
        process(row, start, s.dim - start < CHUNK_SIZE ? s.dim - start : CHUNK_SIZE);
    }
}

template <typename Activation, typename T>
void forward(const T* gate, const T* up, T* y, const GluSizes& s) {
    for_each_chunk(s, [=](int64_t row, int64_t start, int64_t size) {
        const T *g = gate + row * s.gate_stride + start, *u = up + row * s.up_stride + start;
        T* out = y + row * s.dim + start;
        for (int64_t i = 0; i < size; i++)
            store_rounded(Activation::template forward<T>(to_float(g[i]), to_float(u[i])), out[i]);
    });
}

template <typename Activation, typename T>
void backward(const T* grad_output, const T* gate, const T* up, T* grad_gate, T* grad_up, const GluSizes& s) {
    for_each_chunk(s, [=](int64_t row, int64_t start, int64_t size) {
        const T *g = gate + row * s.gate_stride + start, *u = up + row * s.up_stride + start;
        const T* dy = grad_output + row * s.grad_stride + start;
        T *dg = grad_gate + row * s.dim + start, *du = grad_up + row * s.dim + start;
        for (int64_t i = 0; i < size; i++) {
            float unit_dg, unit_du;
            Activation::backward(to_float(g[i]), to_float(u[i]), unit_dg, unit_du);
            const float grad = to_float(dy[i]);
            store_rounded(grad * unit_dg, dg[i]);
            store_rounded(grad * unit_du, du[i]);
        }
    });
}

}  // namespace

#define DEFINE_GLU(ACTIVATION, T, NAME)                                                                                \
    void forward_##NAME(const T* gate, const T* up, T* y, const GluSizes* s) { forward<ACTIVATION>(gate, up, y, *s); } \
    void backward_##NAME(const T* grad_output, const T* gate, const T* up, T* grad_gate, T* grad_up,                   \
                         const GluSizes* s) {                                                                          \
        backward<ACTIVATION>(grad_output, gate, up, grad_gate, grad_up, *s);                                           \
    }

extern "C" {
DEFINE_GLU(Silu, float, silu_fp32)
DEFINE_GLU(Silu, bf16, silu_bf16)
DEFINE_GLU(GeluTanh, float, gelu_tanh_fp32)
DEFINE_GLU(GeluTanh, bf16, gelu_tanh_bf16)
DEFINE_GLU(ClampedSwiglu, float, clamped_swiglu_fp32)
DEFINE_GLU(ClampedSwiglu, bf16, clamped_swiglu_bf16)
}

// Conversion between bf16 and fp32, rounding to nearest with ties to even, like torch.

#pragma once

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

inline float number(float x) { return x; }

inline float number(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void round(float x, float& out) { out = x; }

inline void round(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Value after rounding to T.
template <typename T>
float kept(float x) {
    T out;
    round(x, out);
    return number(out);
}

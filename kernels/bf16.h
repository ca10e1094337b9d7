// Conversion between bf16 and fp32, rounding to nearest with ties to even, like torch.

#pragma once

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void store_rounded(float x, float& out) { out = x; }

inline void store_rounded(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// Value after rounding to T.
template <typename T>
float round_to(float x) {
    T rounded;
    store_rounded(x, rounded);
    return to_float(rounded);
}

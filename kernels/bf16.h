// Numbers of 16 bits with the range of fp32: to fp32 and back, rounded to the nearest and ties to even, as torch does.

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

// What is left of a number that was kept as T.
template <typename T>
float kept(float x) {
    T out;
    round(x, out);
    return number(out);
}

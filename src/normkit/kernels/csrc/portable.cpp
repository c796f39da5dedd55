// Kernels for any CPU: 16-byte registers, which x86-64 and ARM64 always have. ARM64 fuses and converts float16 in them
// (NEON); on x86-64 both are calls, kept apart so that this file stays small.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#include "instructions.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace normkit {
namespace {

struct Instructions {
    static constexpr int bytes = 16;
    typedef float Register __attribute__((vector_size(bytes)));
    typedef double DoubleRegister __attribute__((vector_size(bytes)));
    typedef float HalfRegister __attribute__((vector_size(bytes / 2)));

    static constexpr bool converts_bfloat16 = false, is_for_bfloat16 = false, masks = false;

    typedef uint32_t Words __attribute__((vector_size(bytes)));
    typedef uint16_t Halves __attribute__((vector_size(bytes / 2)));

    static void load_words(const uint16_t* from, Words& to) {
        Halves halves;
        __builtin_memcpy(&halves, from, sizeof halves);
        to = __builtin_convertvector(halves, Words);
    }
    static void store_words(uint16_t* to, Words from) {
        Halves halves = __builtin_convertvector(from, Halves);
        __builtin_memcpy(to, &halves, sizeof halves);
    }

#if defined(__aarch64__)
    static Register fused(Register a, Register b, Register c) {
        return Register(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
    }
    static DoubleRegister fused(DoubleRegister a, DoubleRegister b, DoubleRegister c) {
        return DoubleRegister(vfmaq_f64(float64x2_t(c), float64x2_t(a), float64x2_t(b)));
    }
    static DoubleRegister widen(HalfRegister from) { return DoubleRegister(vcvt_f64_f32(float32x2_t(from))); }
    static HalfRegister narrow(DoubleRegister from) { return HalfRegister(vcvt_f32_f64(float64x2_t(from))); }
    static void load(const uint16_t* from, Register& to) {
        to = Register(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
    }
    static void store(uint16_t* to, Register from) {
        vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(from))));
    }
    static Register rounded_float16(Register value) {
        return Register(vcvt_f32_f16(vcvt_f16_f32(float32x4_t(value))));
    }
#else
    [[gnu::noinline]] static Register fused(Register a, Register b, Register c) {
        for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return c;
    }
    [[gnu::noinline]] static DoubleRegister fused(DoubleRegister a, DoubleRegister b, DoubleRegister c) {
        for (int i = 0; i < 2; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
        return c;
    }
    static DoubleRegister widen(HalfRegister from) { return __builtin_convertvector(from, DoubleRegister); }
    static HalfRegister narrow(DoubleRegister from) { return __builtin_convertvector(from, HalfRegister); }
    [[gnu::noinline]] static void load(const uint16_t* from, Register& to) {
        Half halves[4];
        __builtin_memcpy(halves, from, sizeof halves);
        for (int i = 0; i < 4; ++i) to[i] = halves[i];
    }
    [[gnu::noinline]] static void store(uint16_t* to, Register from) {
        Half halves[4];
        for (int i = 0; i < 4; ++i) halves[i] = static_cast<Half>(from[i]);
        __builtin_memcpy(to, halves, sizeof halves);
    }
    [[gnu::noinline]] static Register rounded_float16(Register value) {
        for (int i = 0; i < 4; ++i) value[i] = static_cast<Half>(value[i]);
        return value;
    }
#endif
};

}  // namespace
}  // namespace normkit

#include "table.h"

namespace normkit {

const Kernels& portable_kernels() { return table; }

}  // namespace normkit

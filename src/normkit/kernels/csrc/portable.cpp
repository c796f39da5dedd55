// Kernels for any CPU: 16-byte registers, which x86-64 and ARM64 always have.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#include "instructions.h"

// x86-64 alone has neither fused multiplication nor float16: calls, kept apart so that this file stays small.
#if defined(__x86_64__)
#define NORMKIT_CALL [[gnu::noinline]]
#else
#define NORMKIT_CALL [[gnu::always_inline]]
#endif

namespace normkit {
namespace {

struct Instructions {
    static constexpr int bytes = 16;
    typedef float Register __attribute__((vector_size(bytes)));
    typedef double DoubleRegister __attribute__((vector_size(bytes)));
    typedef float HalfRegister __attribute__((vector_size(bytes / 2)));

    static constexpr bool converts_bfloat16 = false, is_for_bfloat16 = false;

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

    NORMKIT_CALL static Register fused(Register a, Register b, Register c) {
        for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return c;
    }
    NORMKIT_CALL static DoubleRegister fused(DoubleRegister a, DoubleRegister b, DoubleRegister c) {
        for (int i = 0; i < 2; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
        return c;
    }

    static DoubleRegister widen(HalfRegister from) { return __builtin_convertvector(from, DoubleRegister); }
    static HalfRegister narrow(DoubleRegister from) { return __builtin_convertvector(from, HalfRegister); }

    NORMKIT_CALL static void load(const uint16_t* from, Register& to) {
        _Float16 halves[4];
        __builtin_memcpy(halves, from, sizeof halves);
        for (int i = 0; i < 4; ++i) to[i] = halves[i];
    }
    NORMKIT_CALL static void store(uint16_t* to, Register from) {
        _Float16 halves[4];
        for (int i = 0; i < 4; ++i) halves[i] = static_cast<_Float16>(from[i]);
        __builtin_memcpy(to, halves, sizeof halves);
    }
    NORMKIT_CALL static Register rounded_float16(Register value) {
        for (int i = 0; i < 4; ++i) value[i] = static_cast<_Float16>(value[i]);
        return value;
    }
};

}  // namespace
}  // namespace normkit

#include "table.h"

namespace normkit {

const Kernels& portable_kernels() { return table; }

}  // namespace normkit

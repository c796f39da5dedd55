// Sixteen numbers at a time, in the registers that the including file's instruction set has.
//
//   Lanes<float>, Lanes<double>   16 numbers; + - * and fused act lane by lane
//   load, store                   any dtype <-> Lanes, 16 or fewer
//   rounded<T>(lanes)             rounded to T and back
//
// Included by the four files of one instruction set each, after `Instructions`, which says how wide a register is and
// how float16 is converted. Everything is in an unnamed namespace: the linker must never share code between the sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace normkit {
namespace {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

constexpr int lanes = 16;
// Where sixteen numbers take many registers, rows side by side would only make the code long.
constexpr int unrolled_rows = Instructions::bytes >= 32 ? 4 : 1;

template <class T>
struct Native;
template <>
struct Native<float> {
    typedef float type __attribute__((vector_size(Instructions::bytes)));
    typedef type anywhere __attribute__((aligned(sizeof(float)), may_alias));
};
template <>
struct Native<double> {
    typedef double type __attribute__((vector_size(Instructions::bytes)));
    typedef type anywhere __attribute__((aligned(sizeof(double)), may_alias));
};

template <class T>
struct Lanes {
    using Register = typename Native<T>::type;
    static constexpr int in_register = Instructions::bytes / sizeof(T);
    static constexpr int registers = lanes / in_register;
    Register part[registers];

    [[gnu::always_inline]] static Lanes all(T value) {
        Lanes result;
        for (int i = 0; i < registers; ++i) result.part[i] = value - Register{};
        return result;
    }
};

template <class T>
[[gnu::always_inline]] inline Lanes<T> operator+(Lanes<T> a, const Lanes<T>& b) {
    for (int i = 0; i < Lanes<T>::registers; ++i) a.part[i] += b.part[i];
    return a;
}

template <class T>
[[gnu::always_inline]] inline Lanes<T> operator-(Lanes<T> a, const Lanes<T>& b) {
    for (int i = 0; i < Lanes<T>::registers; ++i) a.part[i] -= b.part[i];
    return a;
}

template <class T>
[[gnu::always_inline]] inline Lanes<T> operator*(Lanes<T> a, const Lanes<T>& b) {
    for (int i = 0; i < Lanes<T>::registers; ++i) a.part[i] *= b.part[i];
    return a;
}

// a * b + c, rounded once. Asked for where it is wanted: the build forbids the compiler to fuse by itself, so that every
// instruction set gives the same bits.
template <class T>
[[gnu::always_inline]] inline Lanes<T> fused(const Lanes<T>& a, const Lanes<T>& b, Lanes<T> c) {
    for (int i = 0; i < Lanes<T>::registers; ++i) c.part[i] = Instructions::fused(a.part[i], b.part[i], c.part[i]);
    return c;
}

template <class To, class From>
[[gnu::always_inline]] inline To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// The bits of one register of floats.
typedef uint32_t Words __attribute__((vector_size(Instructions::bytes)));

// To the nearest bfloat16, ties to even, in the upper half of each word; a NaN stays one. In integers because the
// instruction made for it flushes subnormal numbers to zero.
[[gnu::always_inline]] inline Words rounded_words(Native<float>::type value) {
    Words words = same_bits<Words>(value);
    Words up = words + (0x7fff + ((words >> 16) & 1));
    auto is_nan = value != value;
    return is_nan ? (words | 0x400000) : up;
}

[[gnu::always_inline]] inline void load_register(const bfloat16* from, Native<float>::type& to) {
    Words words;
    Instructions::load_words(&from->bits, words);
    to = same_bits<Native<float>::type>(words << 16);
}

[[gnu::always_inline]] inline void load_register(const float16* from, Native<float>::type& to) {
    Instructions::load(&from->bits, to);
}

template <class T>
[[gnu::always_inline]] inline void load_register(const T* from, typename Native<T>::type& to) {
    // Not memcpy: g++ copies that in two halves, which the next reading of the whole has to wait for.
    to = *reinterpret_cast<const typename Native<T>::anywhere*>(from);
}

template <class Set = Instructions>
[[gnu::always_inline]] inline void store_register(bfloat16* to, Native<float>::type from) {
    if constexpr (Set::converts_bfloat16) {
        if (Set::store_bfloat16(&to->bits, from)) return;
    }
    Instructions::store_words(&to->bits, rounded_words(from) >> 16);
}

[[gnu::always_inline]] inline void store_register(float16* to, Native<float>::type from) {
    Instructions::store(&to->bits, from);
}

template <class T>
[[gnu::always_inline]] inline void store_register(T* to, typename Native<T>::type from) {
    *reinterpret_cast<typename Native<T>::anywhere*>(to) = from;
}

// Half a register of floats and a register of doubles hold as many numbers.
typedef float HalfRegister __attribute__((vector_size(Instructions::bytes / 2)));

[[gnu::always_inline]] inline void load_register(const float* from, Native<double>::type& to) {
    HalfRegister half;
    __builtin_memcpy(&half, from, sizeof half);
    to = Instructions::widen(half);
}

[[gnu::always_inline]] inline void store_register(float* to, Native<double>::type from) {
    HalfRegister half = Instructions::narrow(from);
    __builtin_memcpy(to, &half, sizeof half);
}

template <size_t... i>
[[gnu::always_inline]] inline HalfRegister half_of(Native<float>::type from, int which, std::index_sequence<i...>) {
    constexpr size_t count = sizeof...(i);
    return which ? __builtin_shufflevector(from, from, (count + i)...) : __builtin_shufflevector(from, from, i...);
}

template <size_t... i>
[[gnu::always_inline]] inline Native<float>::type joined(HalfRegister low, HalfRegister high, std::index_sequence<i...>) {
    return __builtin_shufflevector(low, high, i...);
}

[[gnu::always_inline]] inline Lanes<float> narrowed(const Lanes<double>& from) {
    constexpr auto all = std::make_index_sequence<Lanes<float>::in_register>();
    Lanes<float> to;
    for (int i = 0; i < Lanes<float>::registers; ++i) {
        to.part[i] = joined(Instructions::narrow(from.part[2 * i]), Instructions::narrow(from.part[2 * i + 1]), all);
    }
    return to;
}

[[gnu::always_inline]] inline Lanes<double> widened(const Lanes<float>& from) {
    constexpr auto half = std::make_index_sequence<Lanes<double>::in_register>();
    Lanes<double> to;
    for (int i = 0; i < Lanes<double>::registers; ++i) {
        to.part[i] = Instructions::widen(half_of(from.part[i / 2], i % 2, half));
    }
    return to;
}

[[gnu::always_inline]] inline Lanes<double> widened(const Lanes<double>& from) { return from; }

// Sixteen elements as A, the arithmetic type.
template <class A, class T>
[[gnu::always_inline]] inline Lanes<A> load(const T* from) {
    if constexpr (sizeof(A) == 8 && sizeof(T) < 4) {
        return widened(load<float>(from));
    } else {
        Lanes<A> to;
        for (int i = 0; i < Lanes<A>::registers; ++i) load_register(from + i * Lanes<A>::in_register, to.part[i]);
        return to;
    }
}

template <class A, class T>
[[gnu::always_inline]] inline void store(T* to, const Lanes<A>& from) {
    if constexpr (sizeof(A) == 8 && sizeof(T) < 8) {
        store(to, narrowed(from));
    } else {
        for (int i = 0; i < Lanes<A>::registers; ++i) store_register(to + i * Lanes<A>::in_register, from.part[i]);
    }
}

// Fewer than sixteen elements. In pieces of known sizes: a call of memcpy takes longer than all else that a short row needs.
template <class T>
[[gnu::always_inline]] inline void copy_some(T* to, const T* from, int64_t count) {
    auto copy = [&]<int size>(std::integral_constant<int, size>) __attribute__((always_inline)) {
        if (!(count & size)) return;
        __builtin_memcpy(to, from, size * sizeof(T));
        to += size;
        from += size;
    };
    copy(std::integral_constant<int, 8>());
    copy(std::integral_constant<int, 4>());
    copy(std::integral_constant<int, 2>());
    copy(std::integral_constant<int, 1>());
}

// The first `count` elements; the other lanes hold `filler`.
template <class A, class T, class Set = Instructions>
[[gnu::always_inline]] inline Lanes<A> load_some(const T* from, int64_t count, A filler) {
    using Number = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
    typedef Number Numbers __attribute__((vector_size(Instructions::bytes)));
    Lanes<A> to;
    if constexpr (Set::masks && sizeof(T) == sizeof(A)) {
        for (int i = 0; i < Lanes<A>::registers; ++i) {
            Set::load_some(from + i * Lanes<A>::in_register, count - i * Lanes<A>::in_register, to.part[i]);
        }
    } else {
        T some[lanes] = {};
        if constexpr (Set::masks && sizeof(T) == 2) Set::copy_some(&some->bits, &from->bits, count);
        else copy_some(some, from, count);
        to = load<A>(some);
    }
    if (__builtin_constant_p(filler == 0) && filler == 0) return to;
    for (int i = 0; i < Lanes<A>::registers; ++i) {
        Numbers number;
        for (int k = 0; k < Lanes<A>::in_register; ++k) number[k] = i * Lanes<A>::in_register + k;
        to.part[i] = number < static_cast<Number>(count) ? to.part[i] : filler - typename Lanes<A>::Register{};
    }
    return to;
}

template <class A, class T>
[[gnu::noinline]] Lanes<A> load_by_call(const T* from, int64_t count, A filler) {
    return load_some<A>(from, count, filler);
}

template <class A, class T>
[[gnu::always_inline]] inline Lanes<A> load(const T* from, int64_t count, A filler) {
    if constexpr (Instructions::masks) return load_some<A>(from, count, filler);
    else return load_by_call<A>(from, count, filler);
}

template <class A, class T>
[[gnu::noinline]] void store(T* to, const Lanes<A>& from, int64_t count) {
    T some[lanes];
    store(some, from);
    copy_some(to, some, count);
}

template <class T, class A>
[[gnu::always_inline]] inline Lanes<A> rounded(const Lanes<A>& value) {
    if constexpr (sizeof(T) >= sizeof(A)) {
        return value;
    } else if constexpr (sizeof(A) == 8) {
        return widened(rounded<T>(narrowed(value)));
    } else {
        T some[lanes];
        store(some, value);
        return load<A>(some);
    }
}

template <>
[[gnu::always_inline]] inline Lanes<float> rounded<bfloat16, float>(const Lanes<float>& value) {
    Lanes<float> result;
    for (int i = 0; i < Lanes<float>::registers; ++i) {
        result.part[i] = same_bits<Native<float>::type>(rounded_words(value.part[i]) & 0xffff0000u);
    }
    return result;
}

template <>
[[gnu::always_inline]] inline Lanes<float> rounded<float16, float>(const Lanes<float>& value) {
    Lanes<float> result;
    for (int i = 0; i < Lanes<float>::registers; ++i) result.part[i] = Instructions::rounded_float16(value.part[i]);
    return result;
}

// To the nearest bfloat16, in the upper half of each word, of numbers that are no NaN.
[[gnu::always_inline]] inline Words rounded_number_words(Native<float>::type value) {
    Words words = same_bits<Words>(value);
    return words + (0x7fff + ((words >> 16) & 1));
}

// `rounded` of numbers that are no NaN.
template <class T>
[[gnu::always_inline]] inline Lanes<float> rounded_number(const Lanes<float>& value) {
    if constexpr (!std::is_same_v<T, bfloat16>) return rounded<T>(value);
    Lanes<float> result;
    for (int i = 0; i < Lanes<float>::registers; ++i) {
        result.part[i] = same_bits<Native<float>::type>(rounded_number_words(value.part[i]) & 0xffff0000u);
    }
    return result;
}

// Every second of 32 numbers, from the first or the second on: half of the work of taking them in their order.
template <class A>
[[gnu::always_inline]] inline Lanes<A> alternate(const bfloat16* from, bool second) {
    Lanes<A> to;
    for (int i = 0; i < Lanes<A>::registers; ++i) {
        Words words;
        __builtin_memcpy(&words, from + i * (2 * Lanes<A>::in_register), sizeof words);
        to.part[i] = same_bits<typename Native<A>::type>(second ? words & 0xffff0000u : words << 16);
    }
    return to;
}

// Two neighbouring sixteens.
template <class T, class A, class Set = Instructions>
[[gnu::always_inline]] inline void store_two(T* to, const Lanes<A>& first, const Lanes<A>& second) {
    if constexpr (std::is_same_v<T, bfloat16> && Set::converts_bfloat16) {
        if (Set::store_two(&to->bits, first.part[0], second.part[0])) return;
    }
    store(to, first);
    store(to + lanes, second);
}

// The type that rows of T are computed in.
template <class T>
using Arithmetic = std::conditional_t<sizeof(T) == 8, double, float>;

// function.template operator()<T>() for the C++ type of a dtype.
template <class Function>
void with_type(Type type, const Function& function) {
    switch (type) {
        case Type::float32: return function.template operator()<float>();
        case Type::bfloat16: return function.template operator()<bfloat16>();
        case Type::float16: return function.template operator()<float16>();
        case Type::float64: return function.template operator()<double>();
    }
}

}  // namespace
}  // namespace normkit

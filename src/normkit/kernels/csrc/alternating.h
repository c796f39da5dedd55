// Rows of bfloat16 as their even and their odd numbers.
//
//   alternate(numbers, odd)      every second of 32 numbers, as `Lanes`; lanes.h has that of bfloat16
//   in_order(even, odd, which)   the first or the second sixteen of them
//   store_alternate              32 numbers, rounded
#pragma once

#include "lanes.h"

namespace normkit {
namespace {

// On CPUs without an instruction that rounds to bfloat16, rows of it are taken as their even and their odd numbers: these
// are read and written with half of the work. No result is NaN then, which the rounding would have to look for.
template <class T, class Out>
constexpr bool alternates = std::is_same_v<T, bfloat16> && std::is_same_v<Out, bfloat16> &&
                            !Instructions::converts_bfloat16;

template <size_t... i>
[[gnu::always_inline]] inline Native<float>::type every_second(Native<float>::type first, Native<float>::type next,
                                                               bool odd, std::index_sequence<i...>) {
    return odd ? __builtin_shufflevector(first, next, (2 * i + 1)...) : __builtin_shufflevector(first, next, (2 * i)...);
}

template <class A>
[[gnu::always_inline]] inline Lanes<A> alternate(const float* from, bool second) {
    constexpr int in_register = Lanes<float>::in_register;
    Lanes<float> to;
    for (int i = 0; i < Lanes<float>::registers; ++i) {
        Native<float>::type first, next;
        load_register(from + i * (2 * in_register), first);
        load_register(from + i * (2 * in_register) + in_register, next);
        to.part[i] = every_second(first, next, second, std::make_index_sequence<in_register>());
    }
    return to;
}

template <size_t... i>
[[gnu::always_inline]] inline Native<float>::type in_turn(Native<float>::type even, Native<float>::type odd, bool next,
                                                          std::index_sequence<i...>) {
    constexpr size_t count = sizeof...(i), half = count / 2;
    return next ? __builtin_shufflevector(even, odd, (half + i / 2 + i % 2 * count)...)
                : __builtin_shufflevector(even, odd, (i / 2 + i % 2 * count)...);
}

// The first or the second sixteen of 32 numbers, given as `alternate` takes them.
[[gnu::always_inline]] inline Lanes<float> in_order(const Lanes<float>& even, const Lanes<float>& odd, int which) {
    Lanes<float> to;
    for (int i = 0; i < Lanes<float>::registers; ++i) {
        const int from = which * Lanes<float>::registers + i;
        to.part[i] = in_turn(even.part[from / 2], odd.part[from / 2], from % 2,
                             std::make_index_sequence<Lanes<float>::in_register>());
    }
    return to;
}

// 32 numbers, given as `alternate` takes them.
[[gnu::always_inline]] inline void store_alternate(bfloat16* to, const Lanes<float>& first, const Lanes<float>& second,
                                                   bool may_be_nan = false) {
    for (int i = 0; i < Lanes<float>::registers; ++i) {
        const auto low = first.part[i], high = second.part[i];
        const Words words = ((may_be_nan ? rounded_words(low) : rounded_number_words(low)) >> 16) |
                            ((may_be_nan ? rounded_words(high) : rounded_number_words(high)) & 0xffff0000u);
        __builtin_memcpy(to + i * (2 * Lanes<float>::in_register), &words, sizeof words);
    }
}

}  // namespace
}  // namespace normkit

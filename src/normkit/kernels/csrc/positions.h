// How sixteen positions of a row are read and written: all of them, or the first few of its end.
//
//   Whole, Turn, Part             get, any and put of 16 numbers, of one sixteen of four, and of fewer than 16
//   by_sixteens(begin, end, step) the positions of a range, sixteen at a time
//
// Everything is in an unnamed namespace, as in lanes.h.
#pragma once

#include "lanes.h"

namespace normkit {
namespace {

struct Whole {
    static constexpr int turn = 0;

    template <class A, class T>
    [[gnu::always_inline]] Lanes<A> get(const T* from, A = 0) const {
        return load<A>(from);
    }
    template <class A, class T>
    [[gnu::always_inline]] Lanes<A> any(const T* from, A = 0) const {
        return load<A>(from);
    }
    template <class A, class T>
    [[gnu::always_inline]] void put(T* to, const Lanes<A>& value) const {
        store(to, value);
    }
};

// All of them, one sixteen of four that a loop takes in one turn.
struct Turn : Whole {
    int turn;

    explicit Turn(int number) : turn(number) {}
    // 16 numbers of the turn, each of the 64 once, in the order that is quickest.
    template <class A, class T>
    [[gnu::always_inline]] Lanes<A> any(const T* from, A = 0) const {
        if constexpr (std::is_same_v<T, bfloat16>) return alternate<A>(from - turn % 2 * lanes, turn % 2);
        else return load<A>(from);
    }
};

struct Part {
    static constexpr int turn = 0;
    int64_t count;

    template <class A, class T>
    [[gnu::always_inline]] Lanes<A> get(const T* from, A filler = 0) const {
        return load<A>(from, count, filler);
    }
    template <class A, class T>
    [[gnu::always_inline]] Lanes<A> any(const T* from, A filler = 0) const {
        return load<A>(from, count, filler);
    }
    template <class A, class T>
    [[gnu::always_inline]] void put(T* to, const Lanes<A>& value) const {
        store(to, value, count);
    }
};

// step(position, read) over columns begin .. end, sixteen at a time, the last time perhaps fewer.
template <class Step>
[[gnu::always_inline]] inline void by_sixteens(int64_t begin, int64_t end, const Step& step) {
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) step(i, Whole{});
    if (i < end) step(i, Part{end - i});
}

}  // namespace
}  // namespace normkit

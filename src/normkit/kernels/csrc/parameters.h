// Gain and bias in the arithmetic type, with their offset.
//
// Each thread makes its own: numbers that another core has just written come slower than they are computed.
#pragma once

#include <memory>

#include "kernels.h"
#include "lanes.h"
#include "sums.h"

namespace normkit {
namespace {

template <class A>
[[gnu::always_inline]] inline Lanes<A> rounded_to(Type type, const Lanes<A>& value) {
    if (type == Type::bfloat16) return rounded<bfloat16>(value);
    if (type == Type::float16) return rounded<float16>(value);
    return value;
}

template <class T, class A>
void expand(const Parameter& parameter, Type rounded_type, int64_t n, A* result) {
    const T* values = static_cast<const T*>(parameter.values);
    const Lanes<A> offset = Lanes<A>::all(parameter.offset);
    by_sixteens(0, n, [&](int64_t i, auto read) {
        Lanes<A> value = read.template get<A>(values + i) + offset;
        read.put(result + i, rounded_to(rounded_type, parameter.offset_in_own_type ? rounded<T>(value) : value));
    });
}

// The parameter itself where it is in the arithmetic type already. A 16-bit `rounded_type` is what it is rounded to.
template <class A>
class Expanded {
   public:
    Expanded(const Parameter& parameter, int64_t n, Type rounded_type = Type::float32) {
        constexpr Type type = sizeof(A) == 8 ? Type::float64 : Type::float32;
        const bool is_as_given = parameter.type == type && parameter.offset == 0 && rounded_type == Type::float32;
        if (!parameter.values || is_as_given) {
            values_ = static_cast<const A*>(parameter.values);
            return;
        }
        buffer_.reset(new A[n]);
        with_type(parameter.type, [&]<class T>() {
            if constexpr (sizeof(T) <= sizeof(A)) expand<T>(parameter, rounded_type, n, buffer_.get());
        });
        values_ = buffer_.get();
    }
    const A* values() const { return values_; }

   private:
    std::unique_ptr<A[]> buffer_;
    const A* values_;
};

// Whether none of n numbers, if there are any, is NaN or infinite.
template <class A>
inline bool are_finite(const A* values, int64_t n) {
    if (!values) return true;
    Lanes<double> sum;
    sum_over_row<A>(n, &sum, [&](int64_t i, auto read, Lanes<A>& sum) {
        sum = fused(read.template get<A>(values + i), Lanes<A>::all(0), sum);
    });
    return total(sum) == 0;
}

}  // namespace
}  // namespace normkit

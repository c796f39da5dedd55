// What an operator takes beside tensors with rows: conventions, gain and bias, in the terms of kernels.h.
#pragma once

#include <cmath>
#include <optional>

#include "kernels.h"
#include "tensors.h"

namespace normkit {
namespace {

bool is_half(Type type) { return type == Type::bfloat16 || type == Type::float16; }

// The wider of two; float32 of the two that are 16 bits wide.
Type promoted(Type a, Type b) {
    if (a == b) return a;
    return a == Type::float64 || b == Type::float64 ? Type::float64 : Type::float32;
}

// normkit.kernels.signatures.Conventions.
struct Conventions {
    bool centre;
    int64_t eps_placement, divisor;  // inside, outside, clamp; n, n - 1, one
    bool sqrt_n;
    int64_t cast;  // late, early, to the weight's dtype, early with gain and bias
    bool round_rstd, offset_in_parameter_dtype, machine_eps;
    int64_t output, axes;  // the input's dtype, promoted, the weight's

    explicit Conventions(int64_t packed) {
        auto next = [&packed](int bits) {
            int64_t value = packed & ((1 << bits) - 1);
            packed >>= bits;
            return value;
        };
        centre = next(1), eps_placement = next(2), divisor = next(2), sqrt_n = next(1), cast = next(2);
        round_rstd = next(1), offset_in_parameter_dtype = next(1), machine_eps = next(1), output = next(2);
        axes = next(4);
    }

    Norm norm(int64_t n, double eps, Type row) const {
        Norm result;
        result.n = n;
        result.centred = centre;
        result.eps = machine_eps ? (row == Type::float64 ? 0x1p-52 : 0x1p-23) : eps;
        result.eps_placement = static_cast<EpsPlacement>(eps_placement);
        result.divisor = divisor == 2 ? 1 : n - divisor;
        result.multiplier = sqrt_n ? std::sqrt(static_cast<double>(n)) : 1;
        return result;
    }

    // After an early cast the affine part is promoted arithmetic: it stays in 16 bits while its operands do.
    Casts casts(Type input, std::optional<Type> gain, std::optional<Type> bias, double offset) const {
        Casts result;
        if (round_rstd && is_half(input)) result.rstd_type = input;
        result.type = cast == 2 && gain ? *gain : input;
        if (cast == 0 || (cast == 2 && !gain) || !is_half(result.type)) return result;
        result.rounds_parameters = cast == 3;
        if (cast == 3) {
            result.rounds = bias ? 3 : 2;
            return result;
        }
        result.rounds = 1;
        if (gain && (*gain != result.type || (offset != 0 && !offset_in_parameter_dtype))) return result;
        result.rounds = 2;
        if (bias && *bias == result.type) result.rounds = 3;
        return result;
    }

    Type output_type(Type input, std::optional<Type> gain, std::optional<Type> bias) const {
        if (output == 2) return gain.value_or(input);
        if (output == 0) return input;
        for (std::optional<Type> parameter : {gain, bias}) {
            if (parameter) input = promoted(input, *parameter);
        }
        return input;
    }
};

// Gain or bias as the kernels take it, kept alive.
class GivenParameter {
   public:
    Parameter parameter;

    GivenParameter(const MaybeTensor& given, double offset, bool in_own_type, int64_t n, Type row) {
        if (!given) return;
        int64_t numbers = ask(aoti_torch_get_numel, *given);
        STD_TORCH_CHECK(numbers == n, "normkit: expected a parameter of ", n, " numbers, got ", numbers);
        Type type = type_of(*given);
        STD_TORCH_CHECK(type != Type::float64 || row == Type::float64,
                        "normkit: expected a parameter of at most 32 bits beside an input of at most 32");
        const Tensor* source = &*given;
        if (!ask(aoti_torch_is_contiguous, *given)) source = &copy_.emplace(torch::stable::contiguous(*given));
        parameter = {source->const_data_ptr(), type, offset, in_own_type};
    }
    std::optional<Type> type() const { return parameter.values ? std::optional(parameter.type) : std::nullopt; }

   private:
    MaybeTensor copy_;
};

// Everything of a call but the tensors that have rows.
struct Call {
    GivenParameter gain, bias;
    Norm norm;
    Casts casts;
    Type output;

    // `row` is the dtype of what is normalized, `input` that which early casts round to.
    Call(const Conventions& conventions, int64_t n, Type row, Type input, const MaybeTensor& weight,
         const MaybeTensor& bias_given, double eps, double offset)
        : gain(weight, offset, conventions.offset_in_parameter_dtype, n, row),
          bias(bias_given, 0, false, n, row),
          norm(conventions.norm(n, eps, row)),
          casts(conventions.casts(input, gain.type(), bias.type(), offset)),
          output(conventions.output_type(input, gain.type(), bias.type())) {
        norm.gain = gain.parameter;
        norm.bias = bias.parameter;
    }
};

}  // namespace
}  // namespace normkit

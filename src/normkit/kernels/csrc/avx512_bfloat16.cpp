// Kernels for CPUs with AVX-512 and its bfloat16 instructions (servers from 2020, Zen 4).
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#include "instructions.h"

#if defined(__x86_64__)

#include <immintrin.h>

// From here to the end of the file: the linker must find no such code outside of it.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")

#include "avx512.h"

namespace normkit {
namespace {

struct Instructions : Avx512 {
    static constexpr bool converts_bfloat16 = true, is_for_bfloat16 = true, masks = false;

    // False if there are subnormal numbers, which the instruction would flush to zero.
    [[gnu::always_inline]] static bool store_bfloat16(uint16_t* to, const __m512& from) {
        constexpr int is_subnormal = 0x20;
        if (_mm512_fpclass_ps_mask(from, is_subnormal)) return false;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(from)));
        return true;
    }
    // False if there may be: zeros are looked at again.
    [[gnu::always_inline]] static bool store_two(uint16_t* to, const __m512& first, const __m512& second) {
        __m512i packed = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
        if (_mm512_testn_epi16_mask(packed, _mm512_set1_epi16(0x7fff))) return false;
        _mm512_storeu_si512(to, packed);
        return true;
    }
};

}  // namespace
}  // namespace normkit

#include "table.h"

namespace normkit {
namespace {

// The other dtypes are computed as without these instructions.
bool is_bfloat16(Type a, Type b) { return a == Type::bfloat16 || b == Type::bfloat16; }

void forward(const Forward& task, int64_t begin, int64_t end) {
    auto run = is_bfloat16(task.x_type, task.y_type) ? any_forward : avx512_kernels()->forward;
    run(task, begin, end);
}

void backward(const Backward& task, int64_t first, int64_t last) {
    auto run = is_bfloat16(task.x_type, task.dy_type) ? any_backward : avx512_kernels()->backward;
    run(task, first, last);
}

void measure(const Backward& task, int64_t begin, int64_t end, RowTerms* terms) {
    auto run = is_bfloat16(task.x_type, task.dy_type) ? any_measure : avx512_kernels()->measure;
    run(task, begin, end, terms);
}

void backward_columns(const Backward& task, const RowTerms* terms, Columns columns) {
    auto run = is_bfloat16(task.x_type, task.dy_type) ? any_columns : avx512_kernels()->backward_columns;
    run(task, terms, columns);
}

void turn_numbers(Turning& task, double* room) { avx512_kernels()->turn(task, room); }

constexpr Kernels table_of_all{forward,    backward,    measure,    backward_columns,
                               any_reduce, any_moments, any_finite, turn_numbers};

}  // namespace

const Kernels* avx512_bfloat16_kernels() {
    bool is_here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bf16");
    return is_here ? &table_of_all : nullptr;
}

}  // namespace normkit

#else

const normkit::Kernels* normkit::avx512_bfloat16_kernels() { return nullptr; }

#endif

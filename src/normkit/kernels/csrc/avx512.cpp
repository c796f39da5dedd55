// Kernels for CPUs with AVX-512 (servers from 2017, Zen 4): 64-byte registers.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#include "instructions.h"

#if defined(__x86_64__)

#include <immintrin.h>

// From here to the end of the file: the linker must find no such code outside of it.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

#include "avx512.h"

namespace normkit {
namespace {

struct Instructions : Avx512 {
    static constexpr bool converts_bfloat16 = false, is_for_bfloat16 = false, masks = false;
};

}  // namespace
}  // namespace normkit

#include "table.h"

namespace normkit {

const Kernels* avx512_kernels() {
    bool is_here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return is_here ? &table : nullptr;
}

}  // namespace normkit

#else

const normkit::Kernels* normkit::avx512_kernels() { return nullptr; }

#endif

// Kernels for CPUs with AVX2, FMA and F16C (2013 on): 32-byte registers.
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#include "instructions.h"

#if defined(__x86_64__)

#include <immintrin.h>

// From here to the end of the file: the linker must find no such code outside of it.
#pragma GCC target("avx2,fma,f16c")

namespace normkit {
namespace {

struct Instructions {
    static constexpr int bytes = 32;

    static constexpr bool converts_bfloat16 = false, is_for_bfloat16 = false, masks = true;

    typedef uint32_t Words __attribute__((vector_size(bytes)));

    [[gnu::always_inline]] static void load_words(const uint16_t* from, Words& to) {
        to = reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    [[gnu::always_inline]] static void store_words(uint16_t* to, Words from) {
        __m256i words = reinterpret_cast<__m256i>(from);
        __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
    }
    [[gnu::always_inline]] static __m256 rounded_float16(__m256 value) {
        return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    [[gnu::always_inline]] static __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
    [[gnu::always_inline]] static __m256d fused(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
    [[gnu::always_inline]] static __m256d widen(__m128 from) { return _mm256_cvtps_pd(from); }
    [[gnu::always_inline]] static __m128 narrow(__m256d from) { return _mm256_cvtpd_ps(from); }
    // The first `count` numbers of a register, the others 0; nothing behind them is read.
    [[gnu::always_inline]] static void load_some(const float* from, int64_t count, __m256& to) {
        const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        to = _mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), number));
    }
    [[gnu::always_inline]] static void load_some(const double* from, int64_t count, __m256d& to) {
        to = _mm256_maskload_pd(from, _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3)));
    }
    // `count` of sixteen numbers, by pairs and perhaps one more; the others become 0.
    [[gnu::always_inline]] static void copy_some(uint16_t* to, const uint16_t* from, int64_t count) {
        const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), pairs = _mm256_set1_epi32(count / 2);
        const __m256i last = _mm256_set1_epi32(count % 2 ? from[count - 1] : 0);
        __m256i some = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), _mm256_cmpgt_epi32(pairs, number));
        some = _mm256_or_si256(some, _mm256_and_si256(last, _mm256_cmpeq_epi32(pairs, number)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), some);
    }
    [[gnu::always_inline]] static void load(const uint16_t* from, __m256& to) {
        to = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    [[gnu::always_inline]] static void store(uint16_t* to, __m256 from) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT));
    }
};

}  // namespace
}  // namespace normkit

#include "table.h"

namespace normkit {

const Kernels* avx2_kernels() {
    bool is_here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return is_here ? &table : nullptr;
}

}  // namespace normkit

#else

const normkit::Kernels* normkit::avx2_kernels() { return nullptr; }

#endif

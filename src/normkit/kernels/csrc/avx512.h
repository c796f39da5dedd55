// Registers of 64 bytes, for the two files that use them; included after their `#pragma GCC target`.
#pragma once

#include <immintrin.h>

namespace normkit {
namespace {

struct Avx512 {
    static constexpr int bytes = 64;

    typedef uint32_t Words __attribute__((vector_size(bytes)));

    [[gnu::always_inline]] static void load_words(const uint16_t* from, Words& to) {
        to = reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    }
    [[gnu::always_inline]] static void store_words(uint16_t* to, Words from) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(from)));
    }
    [[gnu::always_inline]] static __m512 rounded_float16(__m512 value) {
        return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    [[gnu::always_inline]] static __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
    [[gnu::always_inline]] static __m512d fused(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
    [[gnu::always_inline]] static __m512d widen(__m256 from) { return _mm512_cvtps_pd(from); }
    [[gnu::always_inline]] static __m256 narrow(__m512d from) { return _mm512_cvtpd_ps(from); }
    [[gnu::always_inline]] static void load(const uint16_t* from, __m512& to) {
        to = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    [[gnu::always_inline]] static void store(uint16_t* to, __m512 from) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT));
    }
};

}  // namespace
}  // namespace normkit

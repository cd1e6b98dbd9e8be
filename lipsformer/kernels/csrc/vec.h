// As many floats at a time as a register of the processor holds, with GCC's vector types. Of wider
// types GCC keeps the values in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec load(const float *p) { return *reinterpret_cast<const vec *>(p); }

static inline void store(float *p, vec x) { *reinterpret_cast<vec *>(p) = x; }

// The first n of LANES floats, zeros behind them.
static inline vec load_first(const float *p, int64_t n) {
    vec x = {};
    memcpy(&x, p, n * sizeof(float));
    return x;
}

static inline void store_first(float *p, vec x, int64_t n) { memcpy(p, &x, n * sizeof(float)); }

constexpr int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Memory of zeros in parts of whole vectors. A vector never lies in two lines of the cache: one that is
// loaded soon after it was stored would be waited for.
struct Scratch {
    std::unique_ptr<float[]> memory;
    float *free;

    explicit Scratch(int64_t floats)
        : memory(new float[floats + LANES]()),
          free(memory.get() + -(reinterpret_cast<uintptr_t>(memory.get()) / 4) % LANES) {}

    float *take(int64_t floats) {
        float *p = free;
        free += round_up(floats);
        return p;
    }
};

static inline vec splat(float x) { return x - vec{}; }

// Sums and maxima over 4, 8 or 16 lanes, half by half.
typedef float vec4 __attribute__((vector_size(16)));

static inline float sum(vec4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }

static inline float max(vec4 x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

#if defined(__clang__) || __GNUC__ >= 12
#define HALF(type, x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else  // GCC up to 11, which copies the halves through memory
template <class Half, class Whole, class... Others>
static inline Half half(const Whole &x, int64_t first, Others...) {
    Half y;
    memcpy(&y, reinterpret_cast<const float *>(&x) + first, sizeof(Half));
    return y;
}

#define HALF(type, x, ...) half<type>(x, __VA_ARGS__)
#endif

#ifdef __AVX2__
typedef float vec8 __attribute__((vector_size(32)));

static inline vec4 low(vec8 x) { return HALF(vec4, x, 0, 1, 2, 3); }

static inline vec4 high(vec8 x) { return HALF(vec4, x, 4, 5, 6, 7); }

static inline float sum(vec8 x) { return sum(low(x) + high(x)); }

static inline float max(vec8 x) { return max(low(x) > high(x) ? low(x) : high(x)); }
#endif

#ifdef __AVX512F__
typedef float vec16 __attribute__((vector_size(64)));

static inline vec8 low(vec16 x) { return HALF(vec8, x, 0, 1, 2, 3, 4, 5, 6, 7); }

static inline vec8 high(vec16 x) { return HALF(vec8, x, 8, 9, 10, 11, 12, 13, 14, 15); }

static inline float sum(vec16 x) { return sum(low(x) + high(x)); }

static inline float max(vec16 x) { return max(low(x) > high(x) ? low(x) : high(x)); }
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
typedef int32_t ivec4 __attribute__((vector_size(16)));
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, ivec4{__VA_ARGS__})
#endif

// y = x^T for four rows of four floats.
static inline void transpose_4x4(const float *x, int64_t x_row, float *y, int64_t y_row) {
    vec4 row[4];
    for (int64_t i = 0; i < 4; ++i) memcpy(row + i, x + i * x_row, sizeof(vec4));
    const vec4 left_01 = SHUFFLE(row[0], row[1], 0, 4, 1, 5);
    const vec4 left_23 = SHUFFLE(row[2], row[3], 0, 4, 1, 5);
    const vec4 right_01 = SHUFFLE(row[0], row[1], 2, 6, 3, 7);
    const vec4 right_23 = SHUFFLE(row[2], row[3], 2, 6, 3, 7);
    const vec4 column[4] = {
        SHUFFLE(left_01, left_23, 0, 1, 4, 5), SHUFFLE(left_01, left_23, 2, 3, 6, 7),
        SHUFFLE(right_01, right_23, 0, 1, 4, 5), SHUFFLE(right_01, right_23, 2, 3, 6, 7)};
    for (int64_t i = 0; i < 4; ++i) memcpy(y + i * y_row, column + i, sizeof(vec4));
}

// y = x^T for rows x columns numbers.
static inline void transpose(const float *x, int64_t x_row, int64_t rows, int64_t columns,
                             float *y, int64_t y_row) {
    const int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
    for (int64_t i = 0; i < whole_rows; i += 4)
        for (int64_t j = 0; j < whole_columns; j += 4)
            transpose_4x4(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
            y[j * y_row + i] = x[i * x_row + j];
}

// e^x = 2^n (1 + the result) for -88 <= x <= 0, where n is an integer.
static inline vec exp_parts(vec x, vec &n) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    n = (x * 1.44269504f + shift) - shift;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r;
}

static inline vec at_least(vec x, float least) { return x < least ? splat(least) : x; }  // NaN stays

// 2^n, and 0 for n = -127: products with a number so small are denormal, and processors compute with
// those far more slowly.
static inline vec power_of_2(vec n) {
    const ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    return reinterpret_cast<const vec &>(bits);
}

// e^x for x <= 0, relative error 2e-7; 0 below -87.3, where it would be denormal. NaN stays NaN.
static inline vec exp(vec x) {
    vec n;
#ifdef __AVX512F__
    const vec p = exp_parts(x, n);
    const __m512 least = _mm512_set1_ps(-87.3f);
    const __mmask16 kept = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), least, _CMP_NLT_UQ);
    return reinterpret_cast<vec>(_mm512_maskz_scalef_ps(
        kept, reinterpret_cast<__m512>(p + 1.0f), reinterpret_cast<__m512>(n)));
#else
    const vec p = exp_parts(at_least(x, -88.0f), n);
    return (p + 1.0f) * power_of_2(n);
#endif
}

// e^x - 1 for x <= 0, relative error 2e-7 also near 0.
static inline vec expm1(vec x) {
    vec n;
    const vec p = exp_parts(at_least(x, -88.0f), n), scale = power_of_2(n);
    return p * scale + (scale - 1.0f);
}

// The normal distribution's value and density at x (Abramowitz and Stegun 7.1.26 for x / sqrt(2), of
// which half is the tail; 1e-7).
static inline void normal(vec x, vec &value, vec &density) {
    vec gauss = exp(-0.5f * (x * x));
    vec t = 1.0f / (1.0f + 0.23164189f * (x < 0.0f ? -x : x));
    vec p = splat(0.5307027145f);
    p = p * t - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.127414796f;
    vec tail = (p * t) * gauss;
    value = x < 0.0f ? tail : 1.0f - tail;
    density = gauss * 0.39894228f;
}

static inline vec gelu(vec z) {
    vec value, density;
    normal(z, value, density);
    return z * value;
}

// f(m, v) for m < M and v < V. The loops are unrolled before anything else: of an array of sums that is
// not unrolled by then, GCC 11 and 12 often store every element in each step that adds to it.
template <int64_t M, int64_t V, class F>
inline void each_vector(F f) {
#pragma GCC unroll 14
    for (int64_t m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int64_t v = 0; v < V; ++v) f(m, v);
}

// bfloat16: the upper half of a float, rounded to nearest even.
struct bf16 {
    uint16_t bits;
};

typedef uint16_t half_words __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef __AVX512F__  // one instruction each, where GCC 12 takes four or more

static inline words widen(half_words x) {
    return reinterpret_cast<words>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)));
}

static inline half_words narrow(words x) {
    return reinterpret_cast<half_words>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}

#else

static inline words widen(half_words x) { return __builtin_convertvector(x, words); }

static inline half_words narrow(words x) { return __builtin_convertvector(x, half_words); }

#endif

static inline vec load(const bf16 *p) {
    const words wide = widen(*reinterpret_cast<const half_words *>(p)) << 16;
    return reinterpret_cast<const vec &>(wide);
}

static inline void store(bf16 *p, vec x) {
#ifdef __AVX512BF16__
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
    memcpy(p, &rounded, sizeof(rounded));
#else
    const words bits = reinterpret_cast<const words &>(x);
    const words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const words result = x == x ? rounded : rounded - rounded + 0x7fc0;
    *reinterpret_cast<half_words *>(p) = narrow(result);
#endif
}

static inline vec load_first(const bf16 *p, int64_t n) {
    bf16 all[LANES] = {};
    memcpy(all, p, n * sizeof(bf16));
    return load(all);
}

static inline void store_first(bf16 *p, vec x, int64_t n) {
    bf16 all[LANES];
    store(all, x);
    memcpy(p, all, n * sizeof(bf16));
}

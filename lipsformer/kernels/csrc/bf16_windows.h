// Attention in windows of bfloat16, by an instruction that multiplies 16 pairs of bfloat16 with 16
// others and adds the two products of each pair to a float (AVX512-BF16).
//
// Queries and keys enter it as they are in the map, and their lengths multiply the scores. The lengths
// of the values multiply the weights, which are then rounded to bfloat16. All else is float.
#pragma once

#include "windows.h"

namespace {

typedef uint32_t pair;  // two neighbors, the first one in the lower half

constexpr int64_t PAIRED = 2 * LANES;  // numbers in a vector of pairs

inline __m512bh load_pairs(const pair *p) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
}

inline __m512bh splat_pair(pair x) {
    __m512i splat = _mm512_set1_epi32(x);
    // Clang 16 crashes if it may turn this into a shuffle of bfloat16.
    asm("" : "+v"(splat));
    return reinterpret_cast<__m512bh>(splat);
}

inline vec add_products(vec sum, __m512bh a, __m512bh b) {
    return reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), a, b));
}

// c[m][v] = sum_k <a[m][k], b[k][v]> for M rows and V vectors.
template <int M, int V>
inline void pair_block(const pair *a, int64_t a_row, const pair *b, int64_t b_row, int64_t depth,
                       float *c, int64_t c_row) {
    vec sums[M][V];
    each_vector<M, V>([&](int64_t m, int64_t v) { sums[m][v] = vec{}; });
    for (int64_t k = 0; k < depth; ++k) {
        __m512bh right[V];
        for (int64_t v = 0; v < V; ++v) right[v] = load_pairs(b + k * b_row + v * LANES);
        each_vector<M, V>([&](int64_t m, int64_t v) {
            sums[m][v] = add_products(sums[m][v], splat_pair(a[m * a_row + k]), right[v]);
        });
    }
    each_vector<M, V>([&](int64_t m, int64_t v) { store(c + m * c_row + v * LANES, sums[m][v]); });
}

template <int M>
inline void pair_rows(const pair *a, int64_t a_row, const pair *b, int64_t b_row, int64_t depth,
                      float *c, int64_t c_row, int64_t columns) {
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        pair_block<M, 2>(a, a_row, b + j, b_row, depth, c + j, c_row);
    for (; j < columns; j += LANES) pair_block<M, 1>(a, a_row, b + j, b_row, depth, c + j, c_row);
}

// c = a b for all rows; columns in multiples of LANES.
void pair_product(int64_t rows, const pair *a, int64_t a_row, const pair *b, int64_t b_row,
                  int64_t depth, float *c, int64_t c_row, int64_t columns) {
    constexpr int M = 7;  // the windows have 49 rows
    int64_t i = 0;
    for (; i + M <= rows; i += M)
        pair_rows<M>(a + i * a_row, a_row, b, b_row, depth, c + i * c_row, c_row, columns);
    for (; i < rows; ++i)
        pair_rows<1>(a + i * a_row, a_row, b, b_row, depth, c + i * c_row, c_row, columns);
}

// Copy one head's channels of the window's tokens to rows of pairs, with zeros behind them.
void gather_pairs(const Map &map, const bf16 *from, const int64_t *place, int64_t row, pair *to) {
    for (int64_t t = 0; t < map.n; ++t)
        for (int64_t c = 0; c < map.dim; c += PAIRED) {
            const bf16 *token = from + place[t] * map.in_stride + c;
            pair *const p = to + t * row + c / 2;
            if (place[t] >= 0 && map.dim - c >= PAIRED) {
                memcpy(p, token, PAIRED * sizeof(bf16));  // of a constant size: one instruction
                continue;
            }
            memset(p, 0, PAIRED * sizeof(bf16));
            if (place[t] >= 0) memcpy(p, token, (map.dim - c) * sizeof(bf16));
        }
}

// factors[t] = length / sqrt(|x_t|^2 + eps), and zeros up to the end of the vector.
void length_factors(const pair *x, int64_t n, int64_t row, float length, float eps, float *factors) {
    for (int64_t t = 0; t < n; ++t) {
        vec squares = {};
        for (int64_t c = 0; c < row; c += LANES) {
            const __m512bh pairs = load_pairs(x + t * row + c);
            squares = add_products(squares, pairs, pairs);
        }
        factors[t] = sum(squares);
    }
    for (int64_t t = 0; t < n; t += LANES) {
        const vec square = load(factors + t) + eps;
        const __m512 root = _mm512_sqrt_ps(reinterpret_cast<__m512>(square));
        store(factors + t, length / reinterpret_cast<vec>(root));
    }
    std::fill(factors + n, factors + round_up(n), 0.0f);
}

// Row t of y has the pairs of the numbers in rows 2 t and 2 t + 1 of x.
void pair_up_rows(const pair *x, int64_t n, int64_t row, pair *y) {
    uint16_t first[PAIRED], last[PAIRED];  // where the first and the last 16 pairs come from
    for (int i = 0; i < LANES; ++i) {
        first[2 * i] = i;
        first[2 * i + 1] = PAIRED + i;
        last[2 * i] = LANES + i;
        last[2 * i + 1] = PAIRED + LANES + i;
    }
    const __m512i from_first = _mm512_loadu_si512(first), from_last = _mm512_loadu_si512(last);
    for (int64_t t = 0; t < n; t += 2)
        for (int64_t c = 0; c < row; c += LANES) {
            const __m512i a = _mm512_loadu_si512(x + t * row + c);
            const __m512i b = t + 1 < n ? _mm512_loadu_si512(x + (t + 1) * row + c) : __m512i{};
            _mm512_storeu_si512(y + t * row + 2 * c, _mm512_permutex2var_epi16(a, from_first, b));
            _mm512_storeu_si512(y + t * row + 2 * c + LANES,
                                _mm512_permutex2var_epi16(a, from_last, b));
        }
}

template <>
void cosine_windows_forward(const bf16 *qkv, bf16 *out, const float *bias, const float *tau,
                            const float *lepe, const float *shift, float nu, float eps,
                            int64_t part, int64_t parts, int64_t batch, int64_t height,
                            int64_t width, int64_t heads, int64_t dim, int64_t h, int64_t w,
                            int64_t threads) {
    const Map map{part, parts, batch, height, width, heads, dim, h, w};
    const bf16 *q = map.of_part(qkv), *k = q + map.out_stride, *v = k + map.out_stride;
    const float *part_tau = tau + part * heads;
    bf16 *part_out = map.of_part(out);
    const int64_t n = map.n, pn = map.padded_n, pd = map.padded_dim;
    const int64_t row = (dim + PAIRED - 1) / PAIRED * LANES;  // pairs of a token
    const std::unique_ptr<float[]> padded = pad_bias(map, bias);
    const float *padded_bias = padded.get();
    parallel(threads, [=](const Team &team) {
        std::unique_ptr<int64_t[]> memory(new int64_t[n]);
        int64_t *const place = memory.get();
        const int64_t lepe_floats = lepe ? heads * 10 * pd + frame_floats(map) : 0;
        const int64_t bias_floats = map.wide ? n * pn : 0;
        Scratch scratch(n * (4 * row + pn + pn / 2 + 2 * pd) + row * (pn + 1) + 5 * pn +
                        lepe_floats + bias_floats);
        const auto take_pairs = [&](int64_t n) { return reinterpret_cast<pair *>(scratch.take(n)); };
        pair *queries = take_pairs(n * row), *keys = take_pairs(n * row);
        pair *values = take_pairs(n * row), *value_pairs = take_pairs((n + 1) * row);
        pair *keys_t = take_pairs(row * pn), *weights = take_pairs(n * (pn / 2));
        float *scores = scratch.take(n * pn), *attended = scratch.take(n * pd);
        float *positions = scratch.take(n * pd);
        float *of_queries = scratch.take(pn), *of_keys = scratch.take(pn);
        float *of_values = scratch.take(pn), *sums = scratch.take(pn);
        float *wide_bias = scratch.take(bias_floats), *all_kernels = scratch.take(lepe_floats);
        float *frame = all_kernels + heads * 10 * pd;
        if (lepe) arrange(map, lepe, shift, all_kernels);
        std::fill(of_values, of_values + n, 1.0f);
        team.share(map.windows * heads, [=](int64_t task) {
            const int64_t head = map.head(task), channel = head * dim;
            const float *added = map.wide ? wide_bias : padded_bias + (bias ? head * n * pn : 0);
            if (map.wide) pad_rows(map, bias ? bias + head * n * n : nullptr, wide_bias);
            map.places(map.window(task), place);
            gather_pairs(map, q + channel, place, row, queries);
            gather_pairs(map, k + channel, place, row, keys);
            gather_pairs(map, v + channel, place, row, values);
            length_factors(queries, n, row, part_tau[head], eps, of_queries);
            length_factors(keys, n, row, 1.0f, eps, of_keys);
            if (nu > 0.0f) length_factors(values, n, row, nu, eps, of_values);
            transpose(reinterpret_cast<const float *>(keys), row, n, row,
                      reinterpret_cast<float *>(keys_t), pn);
            pair_up_rows(values, n, row, value_pairs);
            if (lepe) {
                fill_frame(map, reinterpret_cast<const bf16 *>(values), 2 * row, frame);
                convolve_positions(map, all_kernels + head * 10 * pd, frame, positions);
            }
            pair_product(n, queries, row, keys_t, pn, (dim + 1) / 2, scores, pn, pn);
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < pn; j += LANES) {
                    const vec factors = of_queries[i] * load(of_keys + j);
                    float *const p = scores + i * pn + j;
                    store(p, load(p) * factors + load(added + i * pn + j));
                }
            exponentials(scores, n, pn, sums, [=](int64_t i, int64_t j, vec e) {
                store(reinterpret_cast<bf16 *>(weights) + i * pn + j, e * load(of_values + j));
            });
            for (int64_t t = 0; t < n; t += LANES) store(sums + t, 1.0f / load(sums + t));
            pair_product(n, weights, pn / 2, value_pairs, 2 * row, (n + 1) / 2, attended, pd, pd);
            for (int64_t t = 0; t < n; ++t)
                for (int64_t c = 0; c < dim && place[t] >= 0; c += LANES) {
                    vec x = load(attended + t * pd + c) * sums[t];
                    if (lepe) x += load(positions + t * pd + c);
                    bf16 *to = part_out + channel + place[t] * map.out_stride + c;
                    dim - c >= LANES ? store(to, x) : store_first(to, x, dim - c);
                }
        });
    });
}

}  // namespace

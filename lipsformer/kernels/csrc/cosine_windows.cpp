// Scaled cosine attention in the windows of a map of projected tokens, in one pass: a window and head
// at a time is normalized, attended and written back while it lies in the cache.
//
// A sum over a row is a chain of additions, and what needs it must wait. So a loop takes the sums of
// all rows before the next loop uses them: then the processor works on several rows at once.

#include "windows.h"

namespace {

// c[m][j] += sum_k a[m * a_row + k * a_col] * b[k][j] for M rows and V * LANES columns.
template <int M, int V>
inline void product_block(const float *a, int64_t a_row, int64_t a_col, const float *b,
                          int64_t b_row, int64_t depth, float *c, int64_t c_row) {
    vec total[M][V];
    each_vector<M, V>([&](int64_t m, int64_t v) { total[m][v] = load(c + m * c_row + v * LANES); });
    for (int64_t k = 0; k < depth; ++k) {
        vec right[V];
        for (int64_t v = 0; v < V; ++v) right[v] = load(b + k * b_row + v * LANES);
        each_vector<M, V>([&](int64_t m, int64_t v) {
            total[m][v] += a[m * a_row + k * a_col] * right[v];
        });
    }
    each_vector<M, V>([&](int64_t m, int64_t v) { store(c + m * c_row + v * LANES, total[m][v]); });
}

template <int M>
inline void product_rows(const float *a, int64_t a_row, int64_t a_col, const float *b,
                         int64_t b_row, int64_t depth, float *c, int64_t c_row, int64_t columns) {
    constexpr int V = LANES == 4 ? 4 : 2;
    int64_t j = 0;
    for (; j + V * LANES <= columns; j += V * LANES)
        product_block<M, V>(a, a_row, a_col, b + j, b_row, depth, c + j, c_row);
    for (; j < columns; j += LANES)
        product_block<M, 1>(a, a_row, a_col, b + j, b_row, depth, c + j, c_row);
}

// c += a b, with a read as [rows][depth] by the two strides; columns in multiples of LANES.
void product(int64_t rows, const float *a, int64_t a_row, int64_t a_col, const float *b,
             int64_t b_row, int64_t depth, float *c, int64_t c_row, int64_t columns) {
    constexpr int M = LANES == 16 ? 7 : 6;  // AVX2 has 16 registers; the windows have 49 rows
    int64_t m = 0;
    for (; m + M <= rows; m += M)
        product_rows<M>(a + m * a_row, a_row, a_col, b, b_row, depth, c + m * c_row, c_row, columns);
    for (; m < rows; ++m)
        product_rows<1>(a + m * a_row, a_row, a_col, b, b_row, depth, c + m * c_row, c_row, columns);
}

// attn / sums = softmax(queries keys^T + bias), in rows of padded_n; padded is what pad_bias returned.
void weigh(const Map &map, int64_t head, const float *queries, const float *keys_t,
           const float *bias, const float *padded, float *attn, float *sums) {
    const int64_t n = map.n, pn = map.padded_n, pd = map.padded_dim;
    if (padded)
        memcpy(attn, padded + (bias ? head * n * pn : 0), n * pn * sizeof(float));
    else
        pad_rows(map, bias ? bias + head * n * n : nullptr, attn);
    product(n, queries, pd, 1, keys_t, pn, map.dim, attn, pn, pn);
    exponentials(attn, n, pn, sums,
                 [=](int64_t i, int64_t j, vec e) { store(attn + i * pn + j, e); });
}

// One partition of the heads in maps of all: qkv [tokens][3][parts][heads * dim], out
// [tokens][parts][heads * dim], tau [parts][heads]. The others are of this partition alone: bias
// [heads][n][n] or null, lepe [heads * dim][9] and shift [heads * dim] or null. nu <= 0 leaves the
// values as they are.
template <typename T>
void cosine_windows_forward(const T *qkv, T *out, const float *bias, const float *tau,
                            const float *lepe, const float *shift, float nu, float eps,
                            int64_t part, int64_t parts, int64_t batch, int64_t height,
                            int64_t width, int64_t heads, int64_t dim, int64_t h, int64_t w,
                            int64_t threads) {
    const Map map{part, parts, batch, height, width, heads, dim, h, w};
    const T *q = map.of_part(qkv), *k = q + map.out_stride, *v = k + map.out_stride;
    const float *part_tau = tau + part * heads;
    T *part_out = map.of_part(out);
    const int64_t n = map.n, pn = map.padded_n, pd = map.padded_dim;
    const std::unique_ptr<float[]> padded = pad_bias(map, bias);
    const float *padded_bias = padded.get();
    parallel(threads, [=](const Team &team) {
        std::unique_ptr<int64_t[]> place(new int64_t[n]), place_next(new int64_t[n]);
        const int64_t lepe_floats = lepe ? heads * 10 * pd : 0;
        const int64_t in_frame = lepe ? frame_floats(map) : 0;
        Scratch scratch(n * (pn + 4 * pd) + pd * pn + 2 * pn + lepe_floats + in_frame);
        float *queries = scratch.take(n * pd), *keys = scratch.take(n * pd);
        float *values = scratch.take(n * pd), *result = scratch.take(n * pd);
        float *keys_t = scratch.take(pd * pn), *attn = scratch.take(n * pn);
        float *inverse = scratch.take(n), *sums = scratch.take(n);
        float *all_kernels = scratch.take(lepe_floats), *frame = scratch.take(in_frame);
        if (lepe) arrange(map, lepe, shift, all_kernels);
        team.share(map.windows * heads, [&](int64_t task) {
            const int64_t head = map.head(task), channel = head * dim;
            const float *kernels = all_kernels + head * 10 * pd;
            map.gather_task(task, q, k, v, place.get(), place_next.get(), queries, keys, values);
            if (lepe) {
                fill_frame(map, values, pd, frame);
                convolve_positions(map, kernels, frame, result);
            } else {
                clear(result, n * pd);
            }
            map.normalize(queries, part_tau[head], eps, inverse);
            map.normalize(keys, 1.0f, eps, inverse);
            if (nu > 0.0f) map.normalize(values, nu, eps, inverse);
            map.transpose(keys, keys_t);
            weigh(map, head, queries, keys_t, bias, padded_bias, attn, sums);
            float *attended = queries;  // which are no longer needed
            clear(attended, n * pd);
            product(n, attn, pn, 1, values, pd, n, attended, pd, pd);
            for (int64_t t = 0; t < n; ++t) {
                const float factor = 1.0f / sums[t];
                for (int64_t i = t * pd; i < (t + 1) * pd; i += LANES)
                    store(result + i, load(result + i) + load(attended + i) * factor);
            }
            map.scatter(result, place.get(), map.out_stride, part_out + channel);
        });
    });
}

// Gradients of the above; those of bias, tau, lepe and shift (null where there is none) are added to.
template <typename T>
void cosine_windows_backward(const T *qkv, const T *grad_out, const float *bias, const float *tau,
                             const float *lepe, const float *shift, T *grad_qkv, float *grad_bias,
                             float *grad_tau, float *grad_lepe, float *grad_shift, float nu,
                             float eps, int64_t part, int64_t parts, int64_t batch, int64_t height,
                             int64_t width, int64_t heads, int64_t dim, int64_t h, int64_t w,
                             int64_t threads) {
    const Map map{part, parts, batch, height, width, heads, dim, h, w};
    const T *q = map.of_part(qkv), *k = q + map.out_stride, *v = k + map.out_stride;
    T *grad_q = map.of_part(grad_qkv), *grad_k = grad_q + map.out_stride;
    T *grad_v = grad_k + map.out_stride;
    const T *part_grad_out = map.of_part(grad_out);
    const float *part_tau = tau + part * heads;
    float *part_grad_tau = grad_tau + part * heads;
    const int64_t n = map.n, pn = map.padded_n, pd = map.padded_dim;
    const std::unique_ptr<float[]> padded = pad_bias(map, bias);
    const float *padded_bias = padded.get();
    parallel(threads, [=](const Team &team) {
        std::unique_ptr<int64_t[]> place(new int64_t[n]), place_next(new int64_t[n]);
        const int64_t tasks = map.windows * heads;
        const int64_t first_head = map.wide ? team.begin(tasks) / map.windows : 0;
        const int64_t last_head =
            map.wide ? (team.end(tasks) + map.windows - 1) / map.windows : heads;
        const int64_t bias_floats = grad_bias ? (last_head - first_head) * n * pn : 0;
        const int64_t lepe_floats = lepe ? heads * 10 * pd : 0;
        const int64_t in_frame = lepe ? frame_floats(map) : 0;
        Scratch scratch(n * (2 * pn + 7 * pd) + 2 * pd * pn + 4 * pn + round_up(heads) +
                        bias_floats + 2 * lepe_floats + in_frame);
        float *queries = scratch.take(n * pd), *keys = scratch.take(n * pd);
        float *values = scratch.take(n * pd), *grads = scratch.take(n * pd);
        float *grad_queries = scratch.take(n * pd), *grad_keys = scratch.take(n * pd);
        float *grad_values = scratch.take(n * pd);
        float *keys_t = scratch.take(pd * pn), *values_t = scratch.take(pd * pn);
        float *attn = scratch.take(n * pn), *grad_attn = scratch.take(n * pn);
        float *inverse_q = scratch.take(n), *inverse_k = scratch.take(n);
        float *inverse_v = scratch.take(n), *sums = scratch.take(n);
        float *all_kernels = scratch.take(lepe_floats);
        if (lepe) arrange(map, lepe, shift, all_kernels);
        float *tau_sums = scratch.take(heads), *bias_sums = scratch.take(bias_floats);
        float *lepe_sums = scratch.take(lepe_floats), *frame = scratch.take(in_frame);
        team.share(tasks, [&](int64_t task) {
            const int64_t head = map.head(task), channel = head * dim;
            const float *kernels = all_kernels + head * 10 * pd;
            const float factor = part_tau[head];
            map.gather_task(task, q, k, v, place.get(), place_next.get(), queries, keys, values);
            map.gather(part_grad_out + channel, map.out_stride, place.get(), grads);
            if (lepe) fill_frame(map, values, pd, frame);
            map.normalize(queries, factor, eps, inverse_q);
            map.normalize(keys, 1.0f, eps, inverse_k);
            if (nu > 0.0f) map.normalize(values, nu, eps, inverse_v);
            map.transpose(keys, keys_t);
            map.transpose(values, values_t);
            weigh(map, head, queries, keys_t, bias, padded_bias, attn, sums);
            for (int64_t i = 0; i < n; ++i) {
                const float factor = 1.0f / sums[i];
                for (int64_t j = i * pn; j < (i + 1) * pn; j += LANES)
                    store(attn + j, load(attn + j) * factor);
            }

            clear(grad_values, n * pd);
            product(n, attn, 1, pn, grads, pd, n, grad_values, pd, pd);
            clear(grad_attn, n * pn);
            product(n, grads, pd, 1, values_t, pn, dim, grad_attn, pn, pn);
            row_products(grad_attn, attn, n, pn, sums);
            for (int64_t i = 0; i < n; ++i) {
                const float mean = sums[i];
                for (int64_t j = i * pn; j < (i + 1) * pn; j += LANES)
                    store(grad_attn + j, load(attn + j) * (load(grad_attn + j) - mean));
            }
            if (grad_bias) {
                float *total = bias_sums + (head - first_head) * n * pn;
                for (int64_t i = 0; i < n * pn; i += LANES)
                    store(total + i, load(total + i) + load(grad_attn + i));
            }
            clear(grad_queries, n * pd);
            product(n, grad_attn, pn, 1, keys, pd, n, grad_queries, pd, pd);
            clear(grad_keys, n * pd);
            product(n, grad_attn, 1, pn, queries, pd, n, grad_keys, pd, pd);

            vec products = {};
            for (int64_t i = 0; i < n * pd; i += LANES)
                products += load(grad_queries + i) * load(queries + i);
            tau_sums[head] += sum(products) / factor;
            map.normalize_backward(grad_queries, queries, factor, inverse_q, sums);
            map.normalize_backward(grad_keys, keys, 1.0f, inverse_k, sums);
            if (nu > 0.0f) map.normalize_backward(grad_values, values, nu, inverse_v, sums);
            if (lepe) {
                add_position_gradients(map, frame, grads, lepe_sums + head * 10 * pd);
                fill_frame(map, grads, pd, frame);
                convolve_positions_backward(map, kernels, frame, grad_values);
            }
            map.scatter(grad_queries, place.get(), map.in_stride, grad_q + channel);
            map.scatter(grad_keys, place.get(), map.in_stride, grad_k + channel);
            map.scatter(grad_values, place.get(), map.in_stride, grad_v + channel);
        });
        // thread after thread, so that the sums repeat
        team.in_turn([&] {
            for (int64_t head = first_head; grad_bias && head < last_head; ++head)
                for (int64_t i = 0; i < n * n; ++i)
                    grad_bias[head * n * n + i] +=
                        bias_sums[((head - first_head) * n + i / n) * pn + i % n];
            for (int64_t head = 0; head < heads; ++head) {
                part_grad_tau[head] += tau_sums[head];
                for (int64_t i = 0; lepe && i < dim; ++i) {
                    const int64_t channel = head * dim + i;
                    const float *column = lepe_sums + head * 10 * pd + i;
                    for (int64_t tap = 0; tap < 9; ++tap)
                        grad_lepe[channel * 9 + tap] += column[tap * pd];
                    grad_shift[channel] += column[9 * pd];
                }
            }
        });
    });
}

}  // namespace

#ifdef __AVX512BF16__
#include "bf16_windows.h"  // another cosine_windows_forward() for bf16
#endif

EXPORT(cosine_windows_forward)
EXPORT(cosine_windows_backward)

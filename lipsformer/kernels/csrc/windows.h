// Attention in the windows of a map: its tokens, biases, exponentials and convolutions.
#pragma once

#include <cmath>
#include <initializer_list>

#include "export.h"
#include "parallel.h"

namespace {

// products[i] = the sum over a row of a * b.
void row_products(const float *a, const float *b, int64_t rows, int64_t columns, float *products) {
    for (int64_t i = 0; i < rows; ++i) {
        vec total = {};
        for (int64_t j = 0; j < columns; j += LANES)
            total += load(a + i * columns + j) * load(b + i * columns + j);
        products[i] = sum(total);
    }
}

struct Map {
    int64_t part, parts;                       // a partition of the heads, and how many there are
    int64_t batch, height, width, heads, dim;  // heads of a partition, channels per head
    int64_t h, w;                              // window, in tokens
    int64_t out_stride = parts * heads * dim;  // floats from one token to the next
    int64_t in_stride = 3 * out_stride;        // queries, keys and values lie side by side
    int64_t rows = (height + h - 1) / h, cols = (width + w - 1) / w;
    int64_t windows = batch * rows * cols;
    int64_t n = h * w, padded_n = round_up(n), padded_dim = round_up(dim);
    // A head's biases, scores and their gradients then have more than 256 KB each. The windows are
    // taken head by head, so that a thread adds up the gradients of the biases of few heads.
    bool wide = n > 256;

    // The partition's first channel in a map.
    template <typename T>
    T *of_part(T *map) const {
        return map + part * heads * dim;
    }

    int64_t head(int64_t task) const { return wide ? task / windows : task % heads; }

    int64_t window(int64_t task) const { return wide ? task % windows : task / heads; }

    // Token number of every place of a window in the map, -1 beyond its edge.
    void places(int64_t window, int64_t *place) const {
        const int64_t top = window / cols % rows * h, left = window % cols * w;
        const int64_t image = window / (rows * cols);
        for (int64_t y = 0; y < h; ++y)
            for (int64_t x = 0; x < w; ++x) {
                const bool inside = top + y < height && left + x < width;
                place[y * w + x] =
                    inside ? (image * height + top + y) * width + left + x : -1;
            }
    }

    // Copy one head's channels of the window's tokens to rows of padded_dim.
    template <typename T>
    void gather(const T *from, int64_t stride, const int64_t *place, float *to) const {
        for (int64_t t = 0; t < n; ++t)
            for (int64_t c = 0; c < dim; c += LANES) {
                const int64_t left = dim - c;
                vec x = {};
                if (place[t] >= 0) {
                    const T *p = from + place[t] * stride + c;
                    x = left >= LANES ? load(p) : load_first(p, left);
                }
                store(to + t * padded_dim + c, x);
            }
    }

    // Start to load what a task will gather.
    template <typename T>
    void prefetch(int64_t task, std::initializer_list<const T *> parts, int64_t *place) const {
        if (task >= windows * heads) return;
        places(window(task), place);
        for (const T *part : parts)
            for (int64_t t = 0; t < n; ++t)
                for (int64_t c = 0; c < dim && place[t] >= 0; c += LANES)
                    __builtin_prefetch(part + place[t] * in_stride + head(task) * dim + c);
    }

    // Gather one task's queries, keys and values while the next one's are asked for.
    template <typename T>
    void gather_task(int64_t task, const T *q, const T *k, const T *v, int64_t *place,
                     int64_t *place_next, float *queries, float *keys, float *values) const {
        const int64_t channel = head(task) * dim;
        places(window(task), place);
        gather(q + channel, in_stride, place, queries);
        gather(k + channel, in_stride, place, keys);
        gather(v + channel, in_stride, place, values);
        prefetch(task + 1, {q, k, v}, place_next);
    }

    template <typename T>
    void scatter(const float *from, const int64_t *place, int64_t stride, T *to) const {
        for (int64_t t = 0; t < n; ++t)
            for (int64_t c = 0; c < dim && place[t] >= 0; c += LANES) {
                const vec x = load(from + t * padded_dim + c);
                T *p = to + place[t] * stride + c;
                if (dim - c >= LANES)
                    store(p, x);
                else
                    store_first(p, x, dim - c);
            }
    }

    // x <- length * x / sqrt(|x|^2 + eps) for every row; keeps 1 / sqrt(|x|^2 + eps).
    void normalize(float *x, float length, float eps, float *inverse) const {
        row_products(x, x, n, padded_dim, inverse);
        for (int64_t t = 0; t < n; ++t) inverse[t] = 1.0f / __builtin_sqrtf(inverse[t] + eps);
        for (int64_t t = 0; t < n; ++t) {
            float *row = x + t * padded_dim;
            const float factor = inverse[t] * length;
            for (int64_t c = 0; c < padded_dim; c += LANES) store(row + c, load(row + c) * factor);
        }
    }

    // Gradient of normalize, in place; y is its result, sums are n floats to work with.
    void normalize_backward(float *grad, const float *y, float length, const float *inverse,
                            float *sums) const {
        row_products(grad, y, n, padded_dim, sums);
        for (int64_t t = 0; t < n; ++t) {
            float *g = grad + t * padded_dim;
            const float *row = y + t * padded_dim;
            const float along = sums[t] / (length * length);
            const float factor = inverse[t] * length;
            for (int64_t c = 0; c < padded_dim; c += LANES)
                store(g + c, (load(g + c) - load(row + c) * along) * factor);
        }
    }

    // y = x^T for the tokens of a head; a row of y has padded_n numbers.
    void transpose(const float *x, float *y) const {
        ::transpose(x, padded_dim, n, padded_dim, y, padded_n);
    }
};

void clear(float *x, int64_t n) { memset(x, 0, n * sizeof(float)); }

// write(i, j, e) for the vectors e of exp(x - the largest of its row); sums[i] = the sum of the row.
template <class Write>
void exponentials(const float *x, int64_t n, int64_t padded_n, float *sums, Write write) {
    for (int64_t i = 0; i < n; ++i) {
        const float *row = x + i * padded_n;
        vec most = load(row);
        for (int64_t j = LANES; j < padded_n; j += LANES) {
            const vec next = load(row + j);
            most = next > most ? next : most;
        }
        sums[i] = max(most);
    }
    for (int64_t i = 0; i < n; ++i) {
        const float *row = x + i * padded_n;
        const float top = sums[i];
        vec total = {};
        for (int64_t j = 0; j < padded_n; j += LANES) {
            const vec e = exp(load(row + j) - top);
            total += e;
            write(i, j, e);
        }
        sums[i] = sum(total);
    }
}

// One head's biases [n][n], or zeros, in rows of padded_n that end in -infinity.
void pad_rows(const Map &map, const float *bias, float *padded) {
    for (int64_t i = 0; i < map.n; ++i) {
        float *row = padded + i * map.padded_n;
        if (bias)
            memcpy(row, bias + i * map.n, map.n * sizeof(float));
        else
            clear(row, map.n);
        for (int64_t j = map.n; j < map.padded_n; ++j) row[j] = -INFINITY;
    }
}

// The biases of all heads like that; null for wide windows, whose biases are padded when needed.
std::unique_ptr<float[]> pad_bias(const Map &map, const float *bias) {
    if (map.wide) return nullptr;
    const int64_t heads = bias ? map.heads : 1;
    std::unique_ptr<float[]> padded(new float[heads * map.n * map.padded_n]);
    for (int64_t head = 0; head < heads; ++head)
        pad_rows(map, bias ? bias + head * map.n * map.n : nullptr,
                 padded.get() + head * map.n * map.padded_n);
    return padded;
}

// LePE, a depthwise 3x3 convolution inside the window, reads a head's channels from a frame: the
// window with zeros around it, [h + 2][w + 2][padded_dim].
int64_t frame_floats(const Map &map) { return (map.h + 2) * (map.w + 2) * map.padded_dim; }

// Copy a head's channels, which lie in rows of `row` numbers, into a frame.
template <typename T>
void fill_frame(const Map &map, const T *x, int64_t row, float *frame) {
    const int64_t pd = map.padded_dim;
    for (int64_t t = 0; t < map.n; ++t) {
        float *to = frame + ((t / map.w + 1) * (map.w + 2) + t % map.w + 1) * pd;
        for (int64_t c = 0; c < pd; c += LANES) store(to + c, load(x + t * row + c));
    }
}

// f(t, neighbors) for every token t of the window; neighbor(map, neighbors, tap) is one of the 3x3
// vectors around it.
template <class F>
inline void each_token(const Map &map, const float *frame, F f) {
    for (int64_t i = 0; i < map.h; ++i)
        for (int64_t j = 0; j < map.w; ++j)
            f(i * map.w + j, frame + (i * (map.w + 2) + j) * map.padded_dim);
}

inline vec neighbor(const Map &map, const float *neighbors, int64_t tap) {
    return load(neighbors + (tap / 3 * (map.w + 2) + tap % 3) * map.padded_dim);
}

// LePE's parameters by head and then by tap, in rows of padded_dim; the tenth row is its bias.
void arrange(const Map &map, const float *lepe, const float *shift, float *kernels) {
    for (int64_t c = 0; c < map.heads * map.dim; ++c) {
        float *column = kernels + c / map.dim * 10 * map.padded_dim + c % map.dim;
        for (int64_t tap = 0; tap < 9; ++tap) column[tap * map.padded_dim] = lepe[c * 9 + tap];
        column[9 * map.padded_dim] = shift[c];
    }
}

// y = LePE of the values in a frame; y has rows of padded_dim.
void convolve_positions(const Map &map, const float *kernels, const float *frame, float *y) {
    const int64_t pd = map.padded_dim;
    for (int64_t c = 0; c < pd; c += LANES) {
        vec factors[9];
        for (int64_t tap = 0; tap < 9; ++tap) factors[tap] = load(kernels + tap * pd + c);
        const vec shift = load(kernels + 9 * pd + c);
        each_token(map, frame + c, [&](int64_t t, const float *neighbors) {
            vec total = shift;
            for (int64_t tap = 0; tap < 9; ++tap)
                total += factors[tap] * neighbor(map, neighbors, tap);
            store(y + t * pd + c, total);
        });
    }
}

// grad_values += the gradient of LePE's values, from the gradients of its results in a frame.
void convolve_positions_backward(const Map &map, const float *kernels, const float *frame,
                                 float *grad_values) {
    const int64_t pd = map.padded_dim;
    for (int64_t c = 0; c < pd; c += LANES) {
        vec factors[9];
        for (int64_t tap = 0; tap < 9; ++tap) factors[tap] = load(kernels + tap * pd + c);
        each_token(map, frame + c, [&](int64_t t, const float *neighbors) {
            float *y = grad_values + t * pd + c;
            vec total = load(y);
            for (int64_t tap = 0; tap < 9; ++tap)
                total += factors[tap] * neighbor(map, neighbors, 8 - tap);
            store(y, total);
        });
    }
}

// sums += the gradients of LePE's parameters, in their arrangement, from the values in a frame and
// the gradients of the results.
void add_position_gradients(const Map &map, const float *frame, const float *grads, float *sums) {
    const int64_t pd = map.padded_dim;
    for (int64_t c = 0; c < pd; c += LANES) {
        vec products[9] = {}, total = load(sums + 9 * pd + c);
        each_token(map, frame + c, [&](int64_t t, const float *neighbors) {
            const vec g = load(grads + t * pd + c);
            for (int64_t tap = 0; tap < 9; ++tap) products[tap] += neighbor(map, neighbors, tap) * g;
            total += g;
        });
        for (int64_t tap = 0; tap < 9; ++tap)
            store(sums + tap * pd + c, load(sums + tap * pd + c) + products[tap]);
        store(sums + 9 * pd + c, total);
    }
}

}  // namespace

// x + scale * GELU(z) and its gradients, each in one pass over the map.
#include "rows.h"

namespace {

inline vec gelu(vec z) {
    vec value, density;
    normal(z, value, density);
    return z * value;
}

}  // namespace

extern "C" {

// y = x + scale * GELU(z), where z has the samples of index alone if it is given. The scale is one
// row (stride 0) or one per sample of z.
void gelu_residual(const float *x, const float *z, const float *scale, int64_t scale_stride,
                   const int64_t *index, float *y, int64_t samples, int64_t kept, int64_t tokens,
                   int64_t channels, int64_t threads) {
    std::vector<int64_t> slots(samples, -1);  // where in z a sample is
    const int64_t *const slot_of = slots.data();
    for (int64_t k = 0; k < kept; ++k) slots[index == nullptr ? k : index[k]] = k;
    if (samples * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, samples * tokens, [=](int64_t row) {
        const int64_t slot = slot_of[row / tokens];
        const float *from = x + row * channels;
        float *to = y + row * channels;
        if (slot < 0) {
            std::copy(from, from + channels, to);
            return;
        }
        const float *branch = z + (slot * tokens + row % tokens) * channels;
        const float *factor = scale + slot * scale_stride;
        each(channels, [=](int64_t i, auto lanes) {
            const vec added = lanes.load(factor + i) * gelu(lanes.load(branch + i));
            lanes.store(to + i, lanes.load(from + i) + added);
        });
    });
}

// grad_z = grad * scale * GELU'(z); grad_scale, of the scale's shape, sums grad * GELU(z).
void gelu_residual_gradients(const float *grad, const float *z, const float *scale,
                             int64_t scale_stride, const int64_t *index, float *grad_z,
                             float *grad_scale, int64_t kept, int64_t tokens, int64_t channels,
                             int64_t threads) {
    const Parts parts(tokens);
    std::vector<float> sums(kept * parts.count * channels);
    float *const totals = sums.data();
    if (kept * tokens * channels < ALONE) threads = 1;
    parallel_for(threads, kept * parts.count, [=](int64_t unit) {
        const int64_t k = unit / parts.count, part = unit % parts.count;
        const int64_t sample = index == nullptr ? k : index[k];
        const float *factor = scale + k * scale_stride;
        float *total = totals + unit * channels;
        for (int64_t token = parts.begin(part); token < parts.begin(part + 1); ++token) {
            const float *from = grad + (sample * tokens + token) * channels;
            const float *branch = z + (k * tokens + token) * channels;
            float *to = grad_z + (k * tokens + token) * channels;
            each(channels, [=](int64_t i, auto lanes) {
                const vec g = lanes.load(from + i), x = lanes.load(branch + i);
                vec value, density;
                normal(x, value, density);
                lanes.store(to + i, g * lanes.load(factor + i) * (value + x * density));
                lanes.store(total + i, lanes.load(total + i) + g * (x * value));
            });
        }
    });
    std::fill(grad_scale, grad_scale + (scale_stride == 0 ? 1 : kept) * channels, 0.0f);
    for (int64_t k = 0; k < kept; ++k)
        add_parts(sums.data() + k * parts.count * channels, parts.count, channels,
                  grad_scale + k * scale_stride);
}

}  // extern "C"

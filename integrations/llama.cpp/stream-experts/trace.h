// Records what routers choose, as a trace for `hoistway moe replay`: JSON lines, which docs/moe-replay.md describes.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace stream_experts {

class trace {
public:
    struct layer {
        uint32_t number;
        uint32_t experts;
        uint64_t expert_bytes;
    };

    // Replaces the file. Throws std::runtime_error.
    trace(const std::string & path, const std::string & model, uint32_t experts_per_token, const std::vector<layer> & layers);

    // A batch is about to be evaluated, so many of its tokens at a time. One of several tokens counts as a prompt.
    void begin(const llama_batch & batch, uint32_t at_a_time);

    // A layer's router has chosen as many experts as `per_token` for each token that is left in this layer: those of one token
    // after the other. Tokens that cannot be told are left out.
    void visit(uint32_t layer, const std::vector<uint32_t> & chosen, size_t per_token);

    // Writes what was recorded. Throws std::runtime_error.
    void flush();

private:
    std::vector<uint32_t> left(size_t rows) const;

    std::string   path;
    std::ofstream file;
    uint32_t      turn       = 0;
    bool          is_prompt  = false;
    bool          was_answer = false;
    // Numbers of the next batch's first token and of this one's.
    uint32_t next  = 0;
    uint32_t first = 0;
    // Which tokens of the batch have logits.
    std::vector<bool> outputs {};
    uint32_t          at_a_time = 1;
    // The tokens of the batch that pass the layers now: from which on, and how many.
    size_t   from       = 0;
    size_t   count      = 0;
    uint32_t last_layer = 0;
};

} // namespace stream_experts

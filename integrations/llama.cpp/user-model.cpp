#include "user-model.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace {

constexpr const char * EMBEDDING = "token_embd.weight";
constexpr const char * OUTPUT    = "output.weight";

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// What the callback of llama_model_init_from_user collects.
struct loading {
    const hoistway::Catalog &        catalog;
    const user_model::place_tensor & place;
    bool                             tied;
    std::vector<hoistway::Read>      reads {};
    std::vector<std::string>         refused {};

    // No exception may pass through llama.cpp.
    static void on_tensor(ggml_tensor * tensor, void * context) {
        auto & self = *static_cast<loading *>(context);
        try {
            self.add(*tensor);
        } catch (const std::exception & error) {
            self.refused.push_back(tensor->name + std::string(": ") + error.what());
        }
    }

    void add(ggml_tensor & tensor) {
        const std::string name = tensor.name;
        const auto stored = catalog.find(tied && name == OUTPUT ? EMBEDDING : name);
        if (!stored) {
            add_absent(tensor);
        } else if (stored->bytes != ggml_nbytes(&tensor)) {
            refused.push_back(name + " has " + std::to_string(stored->bytes) + " bytes in the file, and " +
                              std::to_string(ggml_nbytes(&tensor)) + " in the model");
        } else if (!ggml_backend_buffer_is_host(tensor.buffer)) {
            refused.push_back(name + " lies in memory of a device, which is not filled here");
        } else if (!place || !place(tensor, *stored)) {
            hoistway::Read read = catalog.to_host(*stored, tensor.data);
            read.name = tensor.name;
            reads.push_back(read);
        }
    }

    // Fills a tensor that the file does not have.
    void add_absent(ggml_tensor & tensor) {
        const std::string name = tensor.name;
        if (tensor.type != GGML_TYPE_F32) {
            refused.push_back(name + " is not in the file, and stands for no plain number");
        } else if (ends_with(name, ".bias")) {
            fill(tensor, 0.0f);
        } else if (ends_with(name, ".scale") || ends_with(name, ".input_scale")) {
            fill(tensor, 1.0f);
        } else {
            refused.push_back(name + " is not in the file, and what stands for it is unknown");
        }
    }

    static void fill(ggml_tensor & tensor, float value) {
        const std::vector<float> values(ggml_nelements(&tensor), value);
        ggml_backend_tensor_set(&tensor, values.data(), 0, ggml_nbytes(&tensor));
    }
};

// Adds a tensor to the metadata, so that llama.cpp creates it with the type that the file has.
void describe(gguf_context & metadata, ggml_context & context, const char * name, const hoistway_tensor & stored) {
    if (stored.ggml_type < 0 || stored.ggml_type >= GGML_TYPE_COUNT) {
        throw std::runtime_error(std::string(name) + " has the type " + stored.dtype +
                                 ", which this llama.cpp does not know");
    }
    std::vector<int64_t> extents(stored.shape, stored.shape + stored.dimensions);
    std::reverse(extents.begin(), extents.end());
    ggml_tensor * tensor =
        ggml_new_tensor(&context, static_cast<ggml_type>(stored.ggml_type), (int) extents.size(), extents.data());
    ggml_set_name(tensor, name);
    gguf_add_tensor(&metadata, tensor);
}

gguf_context_ptr metadata_of(const std::string & path) {
    gguf_context_ptr metadata(gguf_init_from_file(path.c_str(), { /*no_alloc*/ true, /*ctx*/ nullptr }));
    if (!metadata) {
        throw std::runtime_error(path + " has a header that llama.cpp does not take: see its log");
    }
    const int64_t number = gguf_find_key(metadata.get(), "split.no");
    if (number >= 0 && gguf_get_val_u16(metadata.get(), number) != 0) {
        throw std::runtime_error(path + " is a later file of a split model: only the first has its metadata");
    }
    return metadata;
}

} // namespace

hoistway::Catalog open_gguf(const std::string & path) {
    char magic[4] = {};
    std::ifstream(path, std::ios::binary).read(magic, sizeof magic);
    if (std::memcmp(magic, "GGUF", sizeof magic) != 0) {
        throw std::runtime_error(path + " is no GGUF file");
    }
    return hoistway::Catalog({ path });
}

user_model::user_model(const hoistway::Catalog & catalog, const std::string & path,
                       const llama_model_params & parameters, const place_tensor & place) {
    const gguf_context_ptr metadata = metadata_of(path);
    const ggml_context_ptr context(
        ggml_init({ (catalog.size() + 1) * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
    for (const hoistway_tensor & stored : catalog) {
        if (stored.ggml_type == GGML_TYPE_F64 && stored.dimensions > 1) {
            throw std::runtime_error(std::string(stored.name) + " has the type F64, which llama.cpp cannot multiply with");
        }
        if (gguf_find_tensor(metadata.get(), stored.name) < 0) {
            describe(*metadata, *context, stored.name, stored);
        }
    }
    const auto embedding = catalog.find(EMBEDDING);
    const bool tied = gguf_find_tensor(metadata.get(), OUTPUT) < 0 && embedding;
    if (tied) {
        describe(*metadata, *context, OUTPUT, *embedding);
    }

    loading load { catalog, place, tied };
    model.reset(llama_model_init_from_user(metadata.get(), loading::on_tensor, &load, parameters));
    if (!model) {
        throw std::runtime_error("llama.cpp refused the model: see its log");
    }
    if (!load.refused.empty()) {
        throw std::runtime_error(std::to_string(load.refused.size()) +
                                 " tensors cannot be loaded in this way; the first: " + load.refused.front());
    }
    hoistway::Reader().submit(load.reads).wait();
}

// Loads a GGUF model into an unpatched llama.cpp: llama_model_init_from_user makes the tensors, windlass fills them.
//
// Traps of llama_model_init_from_user, and what is done here:
// * It does not know of split files: the catalog does, and the other files' tensors are added to the first's metadata.
// * It creates every optional tensor, in the file or not. A bias that is not there is zero and a scale one, which
//   changes no result; for any other tensor it is unknown what stands for its absence, so the model is refused.
// * It gives models that use the token embedding as output a second tensor: that is read from the same bytes.
#include "evaluate.h"
#include "windlass.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr const char * EMBEDDING = "token_embd.weight";
constexpr const char * OUTPUT    = "output.weight";

[[noreturn]] void fail(const std::string & message) {
    std::fprintf(stderr, "load-from-user: %s\n", message.c_str());
    std::exit(1);
}

void check(windlass_status status, const std::string & what) {
    if (status != WINDLASS_OK) {
        fail(what + ": " + windlass_last_error());
    }
}

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// What the callback of llama_model_init_from_user collects.
struct loading {
    const windlass_catalog *   catalog = nullptr;
    bool                       tied    = false;
    std::vector<windlass_read> reads;
    std::vector<std::string>   refused;

    static void on_tensor(ggml_tensor * tensor, void * context) {
        static_cast<loading *>(context)->add(tensor);
    }

    void add(ggml_tensor * tensor) {
        const std::string name = tensor->name;
        windlass_tensor stored {};
        stored.size = sizeof(stored);
        const char * source = tied && name == OUTPUT ? EMBEDDING : tensor->name;
        if (windlass_catalog_find(catalog, source, &stored) != WINDLASS_OK) {
            if (tensor->type != GGML_TYPE_F32) {
                refused.push_back(name + " is not in the file, and stands for no plain number");
            } else if (ends_with(name, ".bias")) {
                fill(tensor, 0.0f);
            } else if (ends_with(name, ".scale") || ends_with(name, ".input_scale")) {
                fill(tensor, 1.0f);
            } else {
                refused.push_back(name + " is not in the file, and what stands for it is unknown");
            }
        } else if (stored.bytes != ggml_nbytes(tensor)) {
            refused.push_back(name + " has " + std::to_string(stored.bytes) + " bytes in the file, and " +
                              std::to_string(ggml_nbytes(tensor)) + " in the model");
        } else if (!ggml_backend_buffer_is_host(tensor->buffer)) {
            refused.push_back(name + " lies in memory of a device, which this example does not fill");
        } else {
            windlass_read read {};
            read.size        = sizeof(read);
            read.catalog     = catalog;
            read.file        = stored.file;
            read.target      = WINDLASS_TARGET_HOST;
            read.offset      = stored.offset;
            read.length      = stored.bytes;
            read.destination = tensor->data;
            read.name        = tensor->name;
            reads.push_back(read);
        }
    }

    static void fill(ggml_tensor * tensor, float value) {
        const std::vector<float> values(ggml_nelements(tensor), value);
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    }
};

// Adds a tensor to the metadata, so that llama.cpp creates it with the type that the file has.
void describe(gguf_context * metadata, ggml_context * context, const char * name, const windlass_tensor & stored) {
    if (stored.ggml_type < 0 || stored.ggml_type >= GGML_TYPE_COUNT) {
        fail(std::string(name) + " has the type " + stored.dtype + ", which this llama.cpp does not know");
    }
    std::vector<int64_t> extents(stored.shape, stored.shape + stored.dimensions);
    std::reverse(extents.begin(), extents.end());
    ggml_tensor * tensor =
        ggml_new_tensor(context, static_cast<ggml_type>(stored.ggml_type), (int) extents.size(), extents.data());
    ggml_set_name(tensor, name);
    gguf_add_tensor(metadata, tensor);
}

} // namespace

int main(int count, char ** arguments) {
    if (count != 2) {
        fail("usage: load-from-user MODEL.gguf");
    }
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                std::fputs(text, stderr);
            }
        },
        nullptr);
    ggml_backend_load_all();
    const auto start = std::chrono::steady_clock::now();

    const gguf_context_ptr metadata(gguf_init_from_file(arguments[1], { /*no_alloc*/ true, /*ctx*/ nullptr }));
    if (!metadata) {
        fail(std::string(arguments[1]) + " is no GGUF file");
    }
    const int64_t number = gguf_find_key(metadata.get(), "split.no");
    if (number >= 0 && gguf_get_val_u16(metadata.get(), number) != 0) {
        fail(std::string(arguments[1]) + " is a later file of a split model: only the first has its metadata");
    }
    windlass_catalog * opened = nullptr;
    check(windlass_catalog_open(&arguments[1], 1, nullptr, &opened), "the model cannot be opened");
    const std::unique_ptr<windlass_catalog, decltype(&windlass_catalog_free)> catalog(opened, windlass_catalog_free);

    const uint64_t tensors = windlass_catalog_tensor_count(opened);
    const ggml_context_ptr context(ggml_init({ (tensors + 1) * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
    windlass_tensor stored {};
    stored.size = sizeof(stored);
    for (uint64_t i = 0; i < tensors; ++i) {
        check(windlass_catalog_tensor(opened, i, &stored), "a tensor cannot be looked up");
        if (gguf_find_tensor(metadata.get(), stored.name) < 0) {
            describe(metadata.get(), context.get(), stored.name, stored);
        }
    }
    loading load;
    load.catalog = opened;
    load.tied = gguf_find_tensor(metadata.get(), OUTPUT) < 0 &&
                windlass_catalog_find(opened, EMBEDDING, &stored) == WINDLASS_OK;
    if (load.tied) {
        describe(metadata.get(), context.get(), OUTPUT, stored);
    }

    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
        llama_model_init_from_user(metadata.get(), loading::on_tensor, &load, llama_model_default_params()),
        llama_model_free);
    if (!model) {
        fail("llama.cpp refused the model");
    }
    if (!load.refused.empty()) {
        fail(std::to_string(load.refused.size()) + " tensors cannot be loaded in this way; the first: " +
             load.refused.front());
    }

    windlass_reader * created = nullptr;
    check(windlass_reader_create(nullptr, &created), "no reader");
    const std::unique_ptr<windlass_reader, decltype(&windlass_reader_free)> reader(created, windlass_reader_free);
    windlass_batch * submitted = nullptr;
    check(windlass_batch_submit(created, load.reads.data(), load.reads.size(), WINDLASS_DEMAND, &submitted),
          "the weights cannot be read");
    std::unique_ptr<windlass_batch, decltype(&windlass_batch_free)> batch(submitted, windlass_batch_free);
    check(windlass_batch_wait(submitted, UINT64_MAX, nullptr, nullptr), "a weight could not be read");
    batch.reset();
    const double load_seconds = seconds_since(start);

    const evaluation result = evaluate(model.get(), 8, 1, start);
    if (!result.done) {
        fail("the model cannot be evaluated");
    }
    std::printf("{\"loaded\": true, \"load_seconds\": %.6f, \"first_token_seconds\": %.6f, \"hash\": \"%016" PRIx64
                "\"}\n",
                load_seconds, result.first_token_seconds, result.hash);
    return 0;
}

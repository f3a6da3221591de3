// Reads the weights of a load with hoistway: the library is found at run time, and nothing depends on its presence.

// Ollama compiles this folder into mtmd too, which loads no weights of this kind.
#ifndef OLLAMA_COMPAT_MTMD_BUILD

#include "hoistway-weights.h"

#include "hoistway-experts.h"
#include "hoistway-library.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-impl.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using steady_clock = std::chrono::steady_clock;

constexpr double MIB = 1024.0 * 1024.0;
// Ollama gives up on a load that logs nothing for minutes.
constexpr std::chrono::seconds LOG_INTERVAL { 5 };

#ifdef _WIN32
constexpr const char * CUDA_DRIVER = "nvcuda.dll";
#else
constexpr const char * CUDA_DRIVER = "libcuda.so.1";
#endif

// The functions of hoistway that are used here.
struct hoistway_library {
    decltype(&::hoistway_abi_version)   abi_version   = nullptr;
    decltype(&::hoistway_version)       version       = nullptr;
    decltype(&::hoistway_last_error)    last_error    = nullptr;
    decltype(&::hoistway_string_free)   string_free   = nullptr;
    decltype(&::hoistway_reader_create) reader_create = nullptr;
    decltype(&::hoistway_reader_free)   reader_free   = nullptr;
    decltype(&::hoistway_batch_submit)  batch_submit  = nullptr;
    decltype(&::hoistway_batch_wait)    batch_wait    = nullptr;
    decltype(&::hoistway_batch_status)  batch_status  = nullptr;
    decltype(&::hoistway_batch_error)   batch_error   = nullptr;
    decltype(&::hoistway_batch_free)    batch_free    = nullptr;

    // The library that the environment names, or nullptr. Why it cannot be used is said once.
    static const hoistway_library * find() {
        static const std::unique_ptr<const hoistway_library> found = load();
        return found.get();
    }

private:
    static std::unique_ptr<const hoistway_library> load() {
        const char * name = hoistway_library_name();
        if (!name) {
            return nullptr;
        }
        auto library = std::make_unique<hoistway_library>();
        hoistway_shared_library file(name);
        file.find("hoistway_abi_version",   library->abi_version);
        file.find("hoistway_version",       library->version);
        file.find("hoistway_last_error",    library->last_error);
        file.find("hoistway_string_free",   library->string_free);
        file.find("hoistway_reader_create", library->reader_create);
        file.find("hoistway_reader_free",   library->reader_free);
        file.find("hoistway_batch_submit",  library->batch_submit);
        file.find("hoistway_batch_wait",    library->batch_wait);
        file.find("hoistway_batch_status",  library->batch_status);
        file.find("hoistway_batch_error",   library->batch_error);
        file.find("hoistway_batch_free",    library->batch_free);
        if (file.error.empty() && library->abi_version() != HOISTWAY_ABI_VERSION) {
            file.error = "its interface has version " + std::to_string(library->abi_version()) + ", not " +
                         std::to_string(HOISTWAY_ABI_VERSION);
        }
        if (!file.error.empty()) {
            LLAMA_LOG_WARN("hoistway: llama.cpp reads the weights itself, LLAMA_WEIGHT_SOURCE=%s cannot be used: %s\n",
                           name, file.error.c_str());
            return nullptr;
        }
        return library;
    }
};

// CUDA's number of the device with this PCI bus id, or -1.
int cuda_ordinal(const char * pci_bus_id) {
    struct driver {
        int (*count)(int *)                       = nullptr;
        int (*get)(int *, int)                    = nullptr;
        int (*by_pci_bus_id)(int *, const char *) = nullptr;
        bool usable                               = false;

        driver() {
            hoistway_shared_library file(CUDA_DRIVER);
            file.find("cuDeviceGetCount", count);
            file.find("cuDeviceGet", get);
            file.find("cuDeviceGetByPCIBusId", by_pci_bus_id);
            usable = file.error.empty();
        }
    };
    static const driver cuda;

    int wanted = 0;
    int count = 0;
    if (!pci_bus_id || !cuda.usable || cuda.by_pci_bus_id(&wanted, pci_bus_id) != 0 || cuda.count(&count) != 0) {
        return -1;
    }
    for (int ordinal = 0; ordinal < count; ++ordinal) {
        int device = 0;
        if (cuda.get(&device, ordinal) == 0 && device == wanted) {
            return ordinal;
        }
    }
    return -1;
}

// Where hoistway can write to.
struct destination {
    bool    usable = false;
    int32_t target = HOISTWAY_TARGET_HOST;
    int32_t device = 0;
};

destination destination_of(ggml_backend_buffer_t buffer) {
    if (ggml_backend_buffer_is_host(buffer)) {
        return { true, HOISTWAY_TARGET_HOST, 0 };
    }
    ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(buffer);
    ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    // Other buffer types of a device repack weights or spread them over devices.
    if (!device || type != ggml_backend_dev_buffer_type(device)) {
        return {};
    }
    // Devices that are made of others have none.
    const ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    if (!registry || std::strcmp(ggml_backend_reg_name(registry), "CUDA") != 0) {
        return {};
    }
    ggml_backend_dev_props properties;
    ggml_backend_dev_get_props(device, &properties);
    const int ordinal = cuda_ordinal(properties.device_id);
    return { ordinal >= 0, HOISTWAY_TARGET_CUDA, ordinal };
}

} // namespace

struct hoistway_weights::state {
    const hoistway_library * library;
    size_t &                 size_done;
    size_t                   size_data;
    llama_progress_callback  progress;
    void *                   progress_data;

    std::vector<ggml_tensor *>                    tensors {};
    std::vector<hoistway_read>                    reads {};
    std::unordered_set<const ggml_tensor *>       delivered {};
    uint64_t                                      bytes = 0;
    std::pair<ggml_backend_buffer_t, destination> latest { nullptr, {} };

    uint64_t                 furthest = 0;
    bool                     cancelled = false;
    std::exception_ptr       thrown {};
    steady_clock::time_point logged {};

    // No exception of the caller's callback may pass through the library.
    static bool on_progress(void * context, uint64_t done, uint64_t total) {
        auto & self = *static_cast<state *>(context);
        try {
            self.report(done, total);
        } catch (...) {
            self.thrown = std::current_exception();
            self.cancelled = true;
        }
        return !self.cancelled;
    }

    void report(uint64_t done, uint64_t total) {
        const auto now = steady_clock::now();
        if (now - logged >= LOG_INTERVAL) {
            logged = now;
            LLAMA_LOG_INFO("hoistway: %.0f of %.0f MiB\n", done / MIB, total / MIB);
        }
        // What was read of a tensor that then fails is read again, by llama.cpp.
        furthest = std::max(furthest, done);
        if (progress && !progress((float) (size_done + furthest) / size_data, progress_data)) {
            cancelled = true;
        }
    }

    void warn_unused(const char * what) const {
        LLAMA_LOG_WARN("hoistway: llama.cpp reads the weights itself, %s: %s\n", what, library->last_error());
    }

    void collect(const hoistway_batch * batch, steady_clock::time_point started) {
        uint64_t    read = 0;
        size_t      failed = 0;
        std::string reason;
        for (size_t i = 0; i < reads.size(); ++i) {
            if (library->batch_status(batch, i) == HOISTWAY_OK) {
                delivered.insert(tensors[i]);
                read += reads[i].length;
            } else if (failed++ == 0) {
                char * message = nullptr;
                if (library->batch_error(batch, i, &message) == HOISTWAY_OK && message) {
                    reason = message;
                }
                library->string_free(message);
            }
        }
        size_done += read;
        const double seconds = std::chrono::duration<double>(steady_clock::now() - started).count();
        LLAMA_LOG_INFO("hoistway: read %zu tensors, %.1f MiB in %.3f s, %.2f GB/s\n", delivered.size(), read / MIB, seconds,
                       seconds > 0 ? read / seconds / 1e9 : 0.0);
        if (failed > 0) {
            LLAMA_LOG_WARN("hoistway: %zu tensors are left to llama.cpp; the first: %s\n", failed,
                           reason.empty() ? "no reason given" : reason.c_str());
        }
    }
};

hoistway_weights::hoistway_weights(size_t & size_done, size_t size_data, llama_progress_callback progress,
                                   void * progress_data) {
    hoistway_experts_load::check_before_reading();
    if (const hoistway_library * library = hoistway_library::find()) {
        self.reset(new state { library, size_done, size_data, progress, progress_data });
    }
}

hoistway_weights::~hoistway_weights() = default;

void hoistway_weights::add(ggml_tensor * tensor, int file, size_t offset) {
    if (!self) {
        return;
    }
    if (hoistway_experts_load::holds(tensor)) {
        self->size_done += ggml_nbytes(tensor);
        return;
    }
    if (!tensor->buffer || !tensor->data || file < 0 || ggml_nbytes(tensor) == 0) {
        return;
    }
    if (tensor->buffer != self->latest.first) {
        self->latest = { tensor->buffer, destination_of(tensor->buffer) };
    }
    const destination & to = self->latest.second;
    if (!to.usable) {
        return;
    }
    hoistway_read read {};
    read.size        = sizeof(read);
    read.fd          = file;
    read.target      = to.target;
    read.device      = to.device;
    read.offset      = offset;
    read.length      = ggml_nbytes(tensor);
    read.destination = tensor->data;
    read.name        = tensor->name;
    self->tensors.push_back(tensor);
    self->reads.push_back(read);
    self->bytes += read.length;
}

bool hoistway_weights::read() {
    if (!self || self->reads.empty()) {
        return true;
    }
    const hoistway_library & library = *self->library;
    const auto started = steady_clock::now();
    self->logged = started;
    LLAMA_LOG_INFO("hoistway: version %s reads %zu tensors, %.1f MiB\n", library.version(), self->reads.size(),
                   self->bytes / MIB);

    hoistway_reader * created = nullptr;
    if (library.reader_create(nullptr, &created) != HOISTWAY_OK) {
        self->warn_unused("no reader");
        return true;
    }
    const std::unique_ptr<hoistway_reader, decltype(library.reader_free)> reader(created, library.reader_free);
    hoistway_batch * submitted = nullptr;
    if (library.batch_submit(created, self->reads.data(), self->reads.size(), HOISTWAY_DEMAND, &submitted) !=
        HOISTWAY_OK) {
        self->warn_unused("no batch");
        return true;
    }
    // Freeing it waits for reads under way: none writes later into a tensor that llama.cpp reads itself. (After an error
    // of the device a copy may; it has the file's bytes too.)
    std::unique_ptr<hoistway_batch, decltype(library.batch_free)> batch(submitted, library.batch_free);
    library.batch_wait(submitted, UINT64_MAX, state::on_progress, self.get());
    if (!self->cancelled) {
        self->collect(submitted, started);
    }
    batch.reset();
    if (self->thrown) {
        std::rethrow_exception(self->thrown);
    }
    return !self->cancelled;
}

bool hoistway_weights::delivered(const ggml_tensor * tensor) const {
    return hoistway_experts_load::holds(tensor) || (self && self->delivered.count(tensor) > 0);
}

#endif

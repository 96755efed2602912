// torch's interface for host allocators, for tests without a GPU, and a pool that records its calls.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#define PROBE_HAS_HISTORY (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15))

extern "C" {

// Set by the tests.
int probe_is_capturing = 0;
int probe_refuses_streams = 0;
int probe_is_lost = 0;
int probe_has_no_context = 0;

} // extern "C"

namespace {

at::HostAllocator* allocator() {
  return at::getHostAllocator(c10::DeviceType::CUDA);
}

std::string calls;
void (*during_get)() = nullptr;

// A device: the handle of a stream is its id plus 100, and either all streams are captured or none.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kCuda = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {kCuda, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    TORCH_CHECK(!probe_is_lost, "the device is lost");
    return reinterpret_cast<void*>(100 + stream.id());
  }
#if PROBE_HAS_HISTORY
  bool isStreamCapturing(const c10::Stream&) const override { return probe_is_capturing != 0; }
#endif
};

Guard guard;

#if PROBE_HAS_HISTORY
std::shared_ptr<c10::GatheredContext> recorder() {
  TORCH_CHECK(!probe_has_no_context, "there is no context");
  return nullptr;
}
#endif

} // namespace

extern "C" {

// Gives torch a device. Must be the first call.
void probe_use_device() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(Guard::kCuda)].store(&guard);
}

// Returns an allocation, which probe_free frees, or null with the error text in `error`.
void* probe_allocate(size_t bytes, void** address, void** context, char* error, size_t error_bytes) {
  try {
    auto* memory = new at::DataPtr(allocator()->allocate(bytes));
    *address = memory->get();
    *context = memory->get_context();
    return memory;
  } catch (const c10::Error& failure) {
    const bool is_out_of_memory = dynamic_cast<const c10::OutOfMemoryError*>(&failure) != nullptr;
    std::snprintf(error, error_bytes, "%s%s", is_out_of_memory ? "OutOfMemoryError: " : "", failure.what_without_backtrace());
    return nullptr;
  }
}

void probe_free(void* memory) {
  delete static_cast<at::DataPtr*>(memory);
}

int probe_record_event(void* pointer, void* context, int64_t stream, int32_t device) {
  return allocator()->record_event(
      pointer, context, c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)), stream));
}

// Called by the next `get` of the recorder.
void probe_during_get(void (*call)()) {
  during_get = call;
}

// Installs a torch allocator with a higher priority than pinpool's.
void probe_raise_priority() {
  at::setHostAllocator(c10::DeviceType::CUDA, allocator(), 255);
}

void probe_empty_cache() {
  allocator()->empty_cache();
}

// Writes current, peak, allocated and freed of active_requests and of active_bytes, then the current allocations and
// allocated_bytes, then num_host_alloc.
void probe_stats(int64_t* numbers) {
  const auto stats = allocator()->get_stats();
  for (const auto& stat : {stats.active_requests, stats.active_bytes}) {
    for (const auto number : {stat.current, stat.peak, stat.allocated, stat.freed}) {
      *numbers++ = number;
    }
  }
  *numbers++ = stats.allocations.current;
  *numbers++ = stats.allocated_bytes.current;
  *numbers++ = stats.num_host_alloc;
}

void probe_reset_stats() {
  allocator()->reset_accumulated_stats();
  allocator()->reset_peak_stats();
}

#if PROBE_HAS_HISTORY
void probe_record_history(int enabled) {
  allocator()->record_history(enabled != 0, recorder, 100, c10::CachingDeviceAllocator::RecordContext::ALL, true);
}

// The first letter of each action in the history: a(llocated), r(equested to be freed), f(reed), o(ut of memory).
size_t probe_history(char* actions, size_t most) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  size_t count = 0;
  for (const auto& entry : allocator()->get_traces()) {
    const char letter = entry.action_ == Entry::ALLOC ? 'a' : entry.action_ == Entry::FREE_REQUESTED ? 'r' : entry.action_ == Entry::FREE_COMPLETED ? 'f' : 'o';
    if (count < most) {
      actions[count++] = letter;
    }
  }
  return count;
}

size_t probe_segments() {
  return allocator()->get_segments().size();
}
#else
// This version of torch has no history.
void probe_record_history(int) {}

size_t probe_history(char*, size_t) {
  return 0;
}

size_t probe_segments() {
  return 0;
}
#endif

const void* probe_allocator() {
  return allocator();
}

// A pool over malloc that records each call.
struct probe_stream {
  void* handle;
  int32_t device;
};

int probe_pool_get(void*, size_t bytes, void** block, void** address, char* error, size_t error_bytes) {
  calls += "get " + std::to_string(bytes) + "\n";
  if (bytes > (size_t{1} << 30)) {
    std::strncpy(error, "the request exceeds the limit of this pool", error_bytes - 1);
    return 1;
  }
  if (auto* call = std::exchange(during_get, nullptr)) {
    call();
  }
  *block = *address = std::malloc(bytes);
  return 0;
}

int probe_pool_put(void* block, const probe_stream* streams, size_t count) {
  if (probe_refuses_streams && count > 0) {
    calls += "refused\n";
    return 1;
  }
  calls += "put";
  for (size_t index = 0; index < count; ++index) {
    calls += " " + std::to_string(streams[index].device) + ":" + std::to_string(reinterpret_cast<uintptr_t>(streams[index].handle));
  }
  calls += "\n";
  std::free(block);
  return 0;
}

void probe_pool_trim(void*) {
  calls += "trim\n";
}

void probe_pool_totals(void*, void*) {}

int probe_pool_is_capturing(const void*) {
  return probe_is_capturing;
}

int probe_pool_record_foreign_buffer(const void*, const void*) {
  return 0;
}

// The calls recorded since the previous probe_calls.
size_t probe_calls(char* text, size_t most) {
  const size_t length = std::min(calls.size(), most);
  std::memcpy(text, calls.data(), length);
  calls.clear();
  return length;
}

} // extern "C"

// Writes past the end of a part of scratch memory, for a test that AddressSanitizer tells.
//
// arena_overrun OFFSET: writes to the byte at this offset from the end of the first of two parts; prints the size of both
// and returns 0 if nothing stopped it.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pages.h"
#include "workspace.h"

namespace {

constexpr size_t kFloats = 32;  // two cache lines

using paged::Arena;

// Divides memory into two parts, and writes to all of them and to a byte at an offset from the first one's end.
void write_parts(void* memory, int offset) {
  Arena arena(memory);
  auto* const first = arena.take<float>(kFloats);
  auto* const second = arena.take<float>(kFloats);
  for (size_t i = 0; i < kFloats; ++i) first[i] = second[i] = 1.0f;
  reinterpret_cast<volatile char*>(first + kFloats)[offset] = 1;
}

}  // namespace

int main(int, char** arguments) {
  Arena measured(nullptr);
  measured.take<float>(kFloats), measured.take<float>(kFloats);
  void* const memory = paged::allocate_pages(paged::kSmallPage);
  write_parts(memory, std::atoi(arguments[1]));
  std::memset(memory, 0, measured.used());  // the memory is whole again once the arena has ended
  paged::free_pages(memory);
  std::printf("%zu bytes\n", measured.used());
}

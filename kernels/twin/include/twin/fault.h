// A fault is a broken rule: a call that hardware would take, and silently do something else than was meant.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace AscendC::twin {

struct Fault : std::runtime_error {
  Fault(const char* rule, const std::string& text) : std::runtime_error(std::string(rule) + ": " + text) {}
};

std::string Where();  // core and the instruction at work

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void Fail(const char* rule, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Fault(rule, std::string(text) + Where());
}

}  // namespace AscendC::twin

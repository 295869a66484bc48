// SPDX-License-Identifier: Apache-2.0
// Memory that several processes map through a descriptor, and that has no name which could be left behind.
#pragma once

#include "base/file_descriptor.h"
#include "transport/transport.h"

namespace moe {

// Up to whole pages. Throws moeInvalidArgument for 0 and moeOutOfMemory for more than this host could ever hold.
size_t windowBytesFor(size_t bytes);

// Zeroed memory whose size can no longer change, so that nobody who maps it can be hit by SIGBUS for lack of file.
// `bytes` must come from windowBytesFor. Throws moeSystemError or moeOutOfMemory.
FileDescriptor makeSealedMemfd(size_t bytes);

// Empty when `bytes` bytes of another rank's descriptor are safe to map, else a clause that says what is wrong with it.
std::string refuseMemfd(const FileDescriptor& memory, size_t bytes);

// Throws moeSystemError or moeOutOfMemory.
Region mapMemfd(const FileDescriptor& memory, size_t bytes);

}  // namespace moe

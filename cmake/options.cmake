# SPDX-License-Identifier: Apache-2.0
# Languages, build types, warnings, sanitizers and output folders, for every target.
include(GNUInstallDirs)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 99)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endif()

# Programs find the library beside themselves, in the build folder and once installed, wherever the tree is moved.
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set(CMAKE_INSTALL_RPATH "$ORIGIN/${bin_to_lib}")

# -g1 keeps function names and lines for back traces at little cost. Sanitize keeps assertions.
foreach(language C CXX)
  set(CMAKE_${language}_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")
  set(CMAKE_${language}_FLAGS_SANITIZE "-O1 -g1 -fno-omit-frame-pointer")
endforeach()
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(MOE_SANITIZE)
    set(CMAKE_BUILD_TYPE Sanitize)
  else()
    set(CMAKE_BUILD_TYPE Release)
  endif()
endif()

set(host_languages "$<COMPILE_LANGUAGE:C,CXX>")
add_compile_options(
  "$<${host_languages}:-Wall;-Wextra>"
  # GCC 12 warns falsely of overlapping copies inside std::string's operator+ (its bug 105329).
  "$<$<CXX_COMPILER_ID:GNU>:$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>>"
  # Fused multiply-adds would make sums differ between machines.
  "$<${host_languages}:-ffp-contract=off>"
  # Error texts and debug info name files from the root of the project, not of the machine.
  "$<${host_languages}:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>")
# GCC 12 sees overlaps in std::string that are not there (its bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
endif()
if(MOE_WERROR)
  add_compile_options("$<${host_languages}:-Werror>")
endif()

if(MOE_SANITIZE)
  string(REPLACE "," ";" sanitizers "${MOE_SANITIZE}")
  foreach(name IN LISTS sanitizers)
    if(NOT name MATCHES "^(address|undefined|thread)$")
      message(FATAL_ERROR "MOE_SANITIZE=${MOE_SANITIZE}: '${name}' is not one of address, undefined, thread")
    endif()
  endforeach()
  list(LENGTH sanitizers count)
  if("thread" IN_LIST sanitizers AND count GREATER 1)
    message(FATAL_ERROR "MOE_SANITIZE=${MOE_SANITIZE}: thread cannot be combined with another sanitizer")
  endif()
  add_compile_options("$<${host_languages}:-fsanitize=${MOE_SANITIZE};-fno-sanitize-recover=all>")
  add_link_options(-fsanitize=${MOE_SANITIZE})
endif()

find_program(MOE_CCACHE ccache)
mark_as_advanced(MOE_CCACHE)
if(MOE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${MOE_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MOE_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${MOE_CCACHE})
endif()

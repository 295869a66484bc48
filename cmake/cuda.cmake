# SPDX-License-Identifier: Apache-2.0
# Decides whether the CUDA backend is built: sets MOE_CUDA_ENABLED and cuda_sources. cudart is linked statically and
# libcuda is opened at run time, so that the library loads on machines without a GPU.
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/*.cu)
set(MOE_CUDA_ENABLED OFF)

if(NOT MOE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MOE_CUDA=${MOE_CUDA} is not one of AUTO, ON, OFF")
endif()

# Finding out about nvcc takes seconds: not worth it while there is nothing for it to compile.
if(MOE_CUDA STREQUAL "ON" OR (MOE_CUDA STREQUAL "AUTO" AND cuda_sources))
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(MOE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(MOE_NVCC)
    if(MOE_NVCC)
      set(CMAKE_CUDA_COMPILER ${MOE_NVCC})
    endif()
  endif()
  # Set before the language is enabled, or CMake picks an architecture of its own.
  list(GET MOE_CUDA_ARCHITECTURES -1 newest)
  set(CMAKE_CUDA_ARCHITECTURES "")
  foreach(architecture IN LISTS MOE_CUDA_ARCHITECTURES)
    if(architecture STREQUAL newest OR architecture MATCHES "-")
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
    else()
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
    endif()
  endforeach()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(MOE_CUDA_ENABLED ON)
  elseif(MOE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOE_CUDA=ON, but no working nvcc was found. Set CUDACXX or CUDA_HOME, or MOE_CUDA=OFF")
  endif()
endif()

if(MOE_CUDA_ENABLED)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  # Debian 12's CMake, 3.25.1, does not know that nvcc speaks C++20.
  foreach(kind STANDARD EXTENSION)
    if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${kind}_COMPILE_OPTION "-std=c++20")
    endif()
  endforeach()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -lineinfo -DNDEBUG")
  find_package(CUDAToolkit REQUIRED)
  add_compile_options(
    # The same arithmetic as on the host: see -ffp-contract in options.cmake.
    "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>")
  if(MOE_WERROR)
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
  message(STATUS "moecl: CUDA backend with nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
else()
  set(cuda_sources "")
  message(STATUS "moecl: host backend only (MOE_CUDA=${MOE_CUDA})")
endif()

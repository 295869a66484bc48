# SPDX-License-Identifier: Apache-2.0
# Each folder tools/moe_* is one program of that name. Tools see moe.h and libmoecl.so, nothing of src/.
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)

file(GLOB tool_folders CONFIGURE_DEPENDS LIST_DIRECTORIES true ${PROJECT_SOURCE_DIR}/tools/moe_*)
foreach(folder IN LISTS tool_folders)
  file(GLOB_RECURSE tool_sources CONFIGURE_DEPENDS ${folder}/*.cc)
  if(NOT tool_sources)
    continue()
  endif()
  get_filename_component(tool ${folder} NAME)
  add_executable(${tool} ${tool_sources})
  target_include_directories(${tool} PRIVATE ${folder} ${PROJECT_SOURCE_DIR}/tools)
  target_link_libraries(${tool} PRIVATE moecl CLI11::CLI11 nlohmann_json::nlohmann_json Threads::Threads)
  target_compile_definitions(${tool} PRIVATE MOE_TOOL_VERSION="${PROJECT_VERSION}")
  install(TARGETS ${tool})
endforeach()
